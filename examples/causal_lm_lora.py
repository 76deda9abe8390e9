"""Fine-tune a causal language model with LoRA in two stages, and generate.

Tiny and without a download; `GemmaCausalLM.from_preset(...)` and the like take
the place of `task`.
"""

import keras
import keras_hub

import tf_gpipe

devices = tf_gpipe.split_cpu(2)
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
model = tf_gpipe.PipelinedModel.from_model(
    task, num_stages=2, num_micro_batches=4, devices=devices
)
before = sum(w.shape.num_elements() for w in model.trainable_weights)
model.backbone.enable_lora(rank=4)
after = sum(w.shape.num_elements() for w in model.trainable_weights)
print(f"{after:,} of {before:,} parameters are trained")

model.compile(keras.optimizers.Adam(5e-2), sampler="greedy")
texts = ["cdcdcdcd"] * 64
history = model.fit(texts, batch_size=16, epochs=6)
first, last = history.history["loss"][0], history.history["loss"][-1]
print(f"loss: {first:.2f} at first, {last:.2f} in the end")
print("after 'cd':", model.generate("cd", max_length=6))
assert after < before and last < first
