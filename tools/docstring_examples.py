"""MkDocs extension: shows the examples of docstrings as code blocks.

Markdown would take Python's prompt (`>>>`) for nested quotations.
"""

import inspect
import re

import griffe

import tf_gpipe


class Examples(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.name == "PipelinedModel":
            # Its decorator adds the arguments of another class.
            obj.docstring.value = inspect.getdoc(tf_gpipe.PipelinedModel)
        if obj.docstring:
            # From a prompt to the next empty line.
            obj.docstring.value = re.sub(
                r"^>>> .*?(?=\n\n|\Z)",
                r"```pycon\n\g<0>\n```",
                obj.docstring.value,
                flags=re.MULTILINE | re.DOTALL,
            )
