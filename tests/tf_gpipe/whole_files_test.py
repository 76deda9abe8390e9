"""A file or directory is replaced by a whole one, or stays."""

import os
import pathlib
import tempfile
import threading
from unittest import mock

from absl.testing import absltest

from tf_gpipe.whole_files import replacing


class WholeFilesTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = pathlib.Path(
            self.enterContext(tempfile.TemporaryDirectory())
        )
        self.path = self.directory / "file"

    def write(self, text):
        with replacing(self.path) as partial:
            self.assertNotEqual(partial, self.path)
            partial.write_text(text)

    def test_replaced_as_a_whole(self):
        self.write("old")
        for error in (KeyboardInterrupt, ValueError):
            with self.assertRaises(error), replacing(self.path) as partial:
                partial.write_text("new")
                raise error
            self.assertEqual(self.path.read_text(), "old")
            self.assertEqual(os.listdir(self.directory), ["file"])
        self.write("new")
        self.assertEqual(self.path.read_text(), "new")
        self.assertEqual(os.listdir(self.directory), ["file"])

    def test_directory_is_replaced_as_a_whole(self):
        def write(text, error=None):
            with replacing(self.path) as partial:
                self.assertNotEqual(partial, self.path)
                partial.mkdir()
                (partial / text).write_text(text)
                if error:
                    raise error

        write("old")
        for error in (KeyboardInterrupt, OSError):
            with self.assertRaises(error):
                write("new", error)
            self.assertEqual(os.listdir(self.path), ["old"])
            self.assertEqual(os.listdir(self.directory), ["file"])
        rename = mock.patch.object(
            pathlib.Path, "replace", side_effect=OSError("no")
        )
        with rename, self.assertRaises(OSError):
            write("new")
        self.assertEqual(os.listdir(self.path), ["old"])
        write("new")
        self.assertEqual(os.listdir(self.path), ["new"])
        self.assertEqual(os.listdir(self.directory), ["file"])

    def test_file_and_directory(self):
        """Neither takes the place of the other."""
        self.write("old")
        with self.assertRaises(OSError), replacing(self.path) as partial:
            partial.mkdir()
        self.assertEqual(self.path.read_text(), "old")
        self.path.unlink()
        self.path.mkdir()
        with self.assertRaises(OSError):
            self.write("new")
        self.assertEqual(os.listdir(self.directory), ["file"])

    def test_permissions_and_links_stay(self):
        self.write("old")
        self.path.chmod(0o640)
        link = self.directory / "link"
        link.symlink_to(self.path)
        with replacing(str(link)) as partial:
            partial.write_text("new")
        self.assertTrue(link.is_symlink())
        self.assertEqual(self.path.read_text(), "new")
        self.assertEqual(self.path.stat().st_mode & 0o777, 0o640)

    def test_pipe(self):
        os.mkfifo(self.path)
        read = []
        reader = threading.Thread(
            target=lambda: read.append(self.path.read_text())
        )
        reader.start()
        with replacing(self.path) as path:
            path.write_text("text")
        reader.join()
        self.assertEqual(read, ["text"])
        self.assertTrue(self.path.is_fifo())

    def test_no_directory(self):
        with self.assertRaises(NotADirectoryError):
            self.write("")
            with replacing(self.path / "file") as partial:
                partial.write_text("")

    def test_directory_of_a_process_that_died(self):
        """Between the two moments in which directories have other names."""
        place = self.directory / "export"
        partial = place.with_name(f"export.{os.getpid()}.partial")
        before = place.with_name(".export.replaced")
        for path, content in ((partial, "half"), (before, "old")):
            path.mkdir()
            (path / "file").write_text(content)
        with self.assertRaises(KeyError), replacing(place) as new:
            self.assertFalse(new.exists())
            raise KeyError
        self.assertEqual((place / "file").read_text(), "old")
        before.mkdir()
        with replacing(place) as new:
            new.mkdir()
            (new / "file").write_text("new")
        self.assertEqual((place / "file").read_text(), "new")
        self.assertEqual(os.listdir(place.parent), ["export"])


if __name__ == "__main__":
    absltest.main()
