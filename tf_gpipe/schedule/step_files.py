"""The files that a step can be drawn in: a trace, a picture and a page."""

import json
from collections.abc import Mapping
from collections.abc import Sequence

from tf_gpipe import checks
from tf_gpipe import whole_files
from tf_gpipe.schedule import page
from tf_gpipe.schedule import timeline
from tf_gpipe.schedule.simulate import Execution


class StepFiles:
    """Files that the last of some steps, or all of them, are written to.

    All are checked at once, before a step is run that they shall show.

    Args:
        trace: Path of a Chrome trace of the last step, or `None`.
        picture: Path of an image of all steps, or `None`.
        html: Path of a page about all steps, or `None`.

    Raises:
        TypeError, ValueError: If a path cannot be written, or has the ending of
            another format.
        ImportError: If what writes a file is not installed.
    """

    def __init__(
        self,
        trace: str | None = None,
        picture: str | None = None,
        html: str | None = None,
    ):
        files = {"trace": trace, "picture": picture, "html": html}
        for name, path in files.items():
            if path is not None:
                checks.writable(name, path)
        if picture is not None:
            timeline.check_picture(picture)
        if html is not None:
            page.check(html)
        self._trace, self._picture, self._html = trace, picture, html

    def __bool__(self) -> bool:
        """Whether there is any file to write."""
        files = self._trace, self._picture, self._html
        return any(path is not None for path in files)

    def write(
        self,
        steps: Mapping[str, Execution],
        about: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Writes the files.

        Args:
            steps: Dict from the title of a chart to an `Execution`.
            about: For each stage, more cells of its row in the page's table.
        """
        if self._trace is not None:
            trace = timeline.chrome_trace([*steps.values()][-1])
            with whole_files.replacing(self._trace) as new:
                new.write_text(json.dumps(trace))
        if self._picture is not None:
            timeline.picture(steps, self._picture)
        if self._html is not None:
            page.write(steps, self._html, about)
