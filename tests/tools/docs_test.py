"""The documentation is built without a network, and no link is broken."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
from absl.testing import absltest

import tf_gpipe

ROOT = pathlib.Path(__file__).parents[2]
# Markdown links, except those to other sites.
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#]+)")


@pytest.mark.slow
class BuildTest(absltest.TestCase):
    def test_build(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--quiet"]
                + [f"--site-dir={folder}"],
                cwd=ROOT,
                env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
                check=True,
            )
            pages = {
                path.relative_to(folder).as_posix(): path.read_text()
                for path in pathlib.Path(folder).rglob("*.html")
            }
        for name in set(tf_gpipe.__all__) - {"__version__", "callbacks"}:
            self.assertIn(f'id="tf_gpipe.{name}"', pages["api.html"])
        self.assertNotRegex(pages["api.html"], r'id="tf_gpipe[^"]*\._')
        # Included from files beside docs/.
        self.assertIn("tools/test.sh", pages["contributing.html"])
        self.assertIn(tf_gpipe.__version__, pages["changelog.html"])
        # A browser loads nothing from other sites.
        for page in pages.values():
            self.assertNotRegex(page, r"<(script|img)[^>]* src=\"?https?:")
            self.assertNotRegex(page, r"<link[^>]* href=\"?https?:")


class LinksTest(absltest.TestCase):
    def test_readme(self):
        """README, which mkdocs does not build, names files that exist."""
        paths = LINK.findall((ROOT / "README.md").read_text())
        self.assertContainsSubset({"docs/limits.md", "CONTRIBUTING.md"}, paths)
        self.assertEmpty([x for x in paths if not (ROOT / x).exists()])


if __name__ == "__main__":
    absltest.main()
