"""Fine-tune a KerasHub text classifier in two stages.

It needs `pip install keras-hub`. The model is tiny, with random weights, so
that none are downloaded. For a real one replace `task` by a preset:
`keras_hub.models.TextClassifier.from_preset("bert_base_en", num_classes=2)`.
"""

import keras
import keras_hub
import numpy as np

import tf_gpipe

devices = tf_gpipe.split_cpu(2)  # Leave `devices` out on two GPUs.
keras.utils.set_random_seed(0)

good, bad = ["good", "fine", "great"], ["bad", "dull", "poor"]
rest = ["a", "film", "play", "very"]
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *good, *bad, *rest]
task = keras_hub.models.BertTextClassifier(
    keras_hub.models.BertBackbone(
        vocabulary_size=len(words),
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=8,
    ),
    num_classes=2,
    preprocessor=keras_hub.models.BertTextClassifierPreprocessor(
        keras_hub.models.BertTokenizer(words), sequence_length=8
    ),
)

random = np.random.default_rng(0)
labels = random.integers(2, size=256)
texts = [
    f"a very {random.choice(good if label else bad)} {random.choice(rest[1:3])}"
    for label in labels
]

model = tf_gpipe.PipelinedModel.from_model(
    task, num_stages=2, num_micro_batches=4, devices=devices
)
model.compile(
    keras.optimizers.AdamW(5e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(x=texts, y=labels, batch_size=32, epochs=4)
model.save_to_preset("build/classifier")  # The task, without the pipeline.
served = keras_hub.models.TextClassifier.from_preset("build/classifier")
scores = served.predict(["a great play", "a dull film"])
print("classes of the two texts:", np.argmax(scores, axis=1))
assert np.argmax(scores, axis=1).tolist() == [1, 0]
