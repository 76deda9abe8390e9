"""Fine-tune a causal language model with LoRA in two stages, and generate.

It needs `pip install keras-hub`. The model is tiny, and no weights are
downloaded. For a real one replace `task` by a preset, such as
`keras_hub.models.GemmaCausalLM.from_preset("gemma_2b_en")`.
"""

import keras
import keras_hub

import tf_gpipe

devices = tf_gpipe.split_cpu(2)  # Leave `devices` out on two GPUs.
keras.utils.set_random_seed(0)

letters = "abcdefgh"
tokens = ["<|endoftext|>", *letters, "ab"]
tokenizer = keras_hub.models.GPT2Tokenizer(
    {token: i for i, token in enumerate(tokens)}, merges=["a b"]
)
task = keras_hub.models.GPT2CausalLM(
    keras_hub.models.GPT2Backbone(
        vocabulary_size=len(tokens),
        num_layers=4,
        num_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=16,
    ),
    keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8),
)
# Plain Keras trains the model on the alphabet, in place of loading a preset.
task.compile(keras.optimizers.Adam(1e-2), sampler="greedy")
alphabet = letters * 2
task.fit([alphabet[i : i + 7] for i in range(8)] * 128, verbose=2)
print("before:", task.generate("cd", max_length=7, stop_token_ids=None))

model = tf_gpipe.PipelinedModel.from_model(
    task, num_stages=2, num_micro_batches=4, devices=devices
)
before = sum(w.shape.num_elements() for w in model.trainable_weights)
model.backbone.enable_lora(rank=4)  # Freezes most weights, adds small ones.
after = sum(w.shape.num_elements() for w in model.trainable_weights)
print(f"{after:,} of {before:,} parameters are trained")

model.compile(keras.optimizers.Adam(2e-2), sampler="greedy")
history = model.fit(["cdcdcdc"] * 320, batch_size=16, epochs=2, verbose=2)
first, last = history.history["loss"][0], history.history["loss"][-1]
print(f"loss: {first:.2f} at first, {last:.2f} in the end")
print("after:", model.generate("cd", max_length=7, stop_token_ids=None))
assert after < before and last < first
