"""MkDocs extension: shows the examples of docstrings as code blocks.

Markdown would take Python's prompt (`>>>`) for nested quotations.
"""

import re

import griffe


class Examples(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            # From a prompt to the next empty line.
            obj.docstring.value = re.sub(
                r"^>>> .*?(?=\n\n|\Z)",
                r"```pycon\n\g<0>\n```",
                obj.docstring.value,
                flags=re.MULTILINE | re.DOTALL,
            )
