"""Prepares TFDS's Fashion-MNIST from the files of a Debian package."""

import tensorflow_datasets as tfds

from trainers.datasets import packages

# The names of the four files, images and labels of train and test.
_FILES = {
    "train_data": "train-images-idx3-ubyte.gz",
    "train_labels": "train-labels-idx1-ubyte.gz",
    "test_data": "t10k-images-idx3-ubyte.gz",
    "test_labels": "t10k-labels-idx1-ubyte.gz",
}


class FashionMNIST(
    tfds.image_classification.FashionMNIST, skip_registration=True
):
    """TFDS's own builder, which reads the files of a Debian package.

    It writes the same files as TFDS's builder, so that afterwards plain
    `tfds.load("fashion_mnist")` finds the dataset prepared. TFDS's builder
    itself refuses Debian's files: they have been compressed again, and so have
    other checksums.
    """

    name = "fashion_mnist"
    MANUAL_DOWNLOAD_INSTRUCTIONS = "python -m tools.prepare_data fashion_mnist"
    NUM_EXAMPLES = {"train": 60_000, "test": 10_000}
    PACKAGE = packages.Package(
        name="dataset-fashion-mnist",
        version="0.0~git20200523.55506a9",
        license="MIT",
        download="apt-get download dataset-fashion-mnist",
        sha256={
            _FILES["train_data"]: "c59f468a2f672dc815687fe0f8388776"
            "8d799fd8a3f3276145d20f83aa44d888",
            _FILES["train_labels"]: "bad3541b69d912435c50bb6ba87bec29"
            "4ff4f6a2e1246121d8633921760443d9",
            _FILES["test_data"]: "5b4141f0afbad91edebe8549f8fcffe0"
            "87ea10ca49f1dbef5c9a5cd8815ce37b",
            _FILES["test_labels"]: "0402a96d92fd2663957122ceb108a494"
            "c5af83dab82d92729df917d7dec38c34",
        },
    )

    def _info(self):
        info = super()._info()
        return tfds.core.DatasetInfo(
            builder=self,
            description=info.description,
            homepage=info.homepage,
            citation=info.citation,
            license=self.PACKAGE.license,
            features=info.features,
            supervised_keys=info.supervised_keys,
            metadata=tfds.core.MetadataDict(self.PACKAGE.metadata()),
        )

    def _split_generators(self, dl_manager):
        self.PACKAGE.check(dl_manager.manual_dir)
        paths = dl_manager.extract(
            {key: dl_manager.manual_dir / name for key, name in _FILES.items()}
        )
        return {
            split: self._generate_examples(
                num_examples,
                data_path=paths[f"{split}_data"],
                label_path=paths[f"{split}_labels"],
            )
            for split, num_examples in self.NUM_EXAMPLES.items()
        }
