"""Scores against sacrebleu, resource groups, and tables of them."""

import io
import json
import pathlib
import tempfile
from unittest import mock

import keras
import numpy as np
import rich.console
import sacrebleu
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from model_zoo import decoding
from model_zoo.transformer_nmt import transformer_nmt
from tests.trainers import tiny_messages
from trainers import translation_scores
from trainers import translator as translator_module
from trainers.command_line import UserError
from trainers.translation_scores import DirectionScores
from trainers.translator import Translator

PAIRS = [
    ("Save the file and go on", "Die Datei speichern und weitermachen"),
    ("%(count)s users were deleted.", "%(count)s Benutzer wurden gelöscht."),
    ("Please enter a valid number", "Bitte eine gültige Zahl eingeben"),
]
TRANSLATIONS = [
    "Die Datei speichern und weiter",
    "%(count)s Benutzer wurden geändert.",
    "Bitte eine Zahl eingeben",
]


def direction_scores(source, target, num_train, group, chrf):
    return DirectionScores(
        source=source,
        target=target,
        num_train=num_train,
        group=group,
        num_test=10,
        loss=2.0,
        accuracy=0.5,
        bleu=chrf / 2,
        chrf=chrf,
        copy_bleu=3.0,
        copy_chrf=7.0,
        bleu_signature="b",
        chrf_signature="c",
    )


SCORES = [
    direction_scores("en", "xx", 1200, "high", 60.0),
    direction_scores("en", "yy", 300, "low", 20.0),
    direction_scores("en", "zz", 200, "low", 40.0),
    direction_scores("xx", "en", 1200, "high", 70.0),
]


class ScoresTest(tf.test.TestCase, parameterized.TestCase):
    def test_corpus_scores(self):
        sources, references = (list(x) for x in zip(*PAIRS, strict=True))
        scores = translation_scores.corpus_scores(TRANSLATIONS, PAIRS, "de")
        for prefix, texts in (("", TRANSLATIONS), ("copy_", sources)):
            bleu = sacrebleu.corpus_bleu(texts, [references])
            chrf = sacrebleu.corpus_chrf(texts, [references])
            self.assertEqual(scores[f"{prefix}bleu"], bleu.score)
            self.assertEqual(scores[f"{prefix}chrf"], chrf.score)
        self.assertGreater(scores["chrf"], 2 * scores["copy_chrf"])
        self.assertIn("tok:13a", scores["bleu_signature"])
        self.assertIn("nc:6", scores["chrf_signature"])
        for name in ("bleu_signature", "chrf_signature"):
            self.assertIn(f"version:{sacrebleu.__version__}", scores[name])

    @parameterized.parameters(
        ("zh-Hans", "zh", "保存文件并继续", "保存文件并返回"),
        ("ja", "char", "ファイルを保存", "ファイルを削除"),
        ("ru", "13a", "Сохранить файл и далее", "Сохранить файл и выйти"),
    )
    def test_tokenizers(self, language, tokenizer, reference, translation):
        scores = translation_scores.corpus_scores(
            [translation], [("source", reference)], language
        )
        expected = sacrebleu.corpus_bleu(
            [translation], [[reference]], tokenize=tokenizer
        )
        self.assertEqual(scores["bleu"], expected.score)
        self.assertGreater(scores["bleu"], 10)
        self.assertIn(f"tok:{tokenizer}", scores["bleu_signature"])

    @parameterized.parameters(
        ({"a": 5}, "high"),
        ({"a": 5, "b": 9}, "middle high"),
        ({"a": 5, "b": 9, "c": 7}, "low high middle"),
        # Equal numbers are in alphabetical order. There are two languages more
        # than a multiple of three.
        (
            {"d": 5, "b": 5, "c": 5, "a": 5, "e": 4},
            "middle high middle high low",
        ),
    )
    def test_resource_groups(self, num_train, expected):
        groups = translation_scores.resource_groups(num_train)
        self.assertEqual([groups[x] for x in num_train], expected.split())

    def test_means(self):
        means = translation_scores.means(SCORES)
        self.assertEqual(
            [
                (x["directions"], x["group"], x["num_languages"], x["chrf"])
                for x in means
            ],
            [
                ("en > x", "high", 1, 60.0),
                ("en > x", "low", 2, 30.0),
                ("en > x", "all", 3, 40.0),
                ("x > en", "high", 1, 70.0),
                ("x > en", "all", 1, 70.0),
            ],
        )
        self.assertEqual(means[2]["bleu"], 20.0)
        self.assertEqual(means[2]["copy_chrf"], 7.0)

    def test_tables(self):
        printed = io.StringIO()
        console = rich.console.Console(file=printed, width=120)
        for table in translation_scores.tables(SCORES):
            console.print(table)
        lines = [
            [cell.strip() for cell in line.strip("│").split("│")]
            for line in printed.getvalue().splitlines()
            if line.startswith("│")
        ]
        scores = ["2.000", "0.500", "30.0", "3.0", "60.0", "7.0"]
        self.assertIn(["en > xx", "1,200", "high", "10", *scores], lines)
        self.assertIn(["en > x", "high", "1", *scores], lines)
        # Directions into English are last; the others are by training pairs.
        self.assertEqual(
            [line[0] for line in lines[:4]],
            ["en > xx", "en > yy", "en > zz", "xx > en"],
        )

    def test_files(self):
        directory = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
        translation_scores.save(SCORES, directory / "scores.json")
        content = json.loads((directory / "scores.json").read_text())
        self.assertEqual(
            [DirectionScores(**x) for x in content["directions"]], SCORES
        )
        self.assertEqual(content["means"], translation_scores.means(SCORES))
        translation_scores.draw(SCORES, directory / "scores.png")
        picture = (directory / "scores.png").read_bytes()
        self.assertStartsWith(picture, b"\x89PNG")


class TranslatorTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        directory = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
        self.vocabulary = tiny_messages.vocabulary(directory / "v.model")
        self.model = transformer_nmt(
            1,
            ffn_dim=8,
            num_heads=2,
            dim=8,
            head_size=4,
            vocabulary=self.vocabulary.size,
            # With tied weights the most likely token is the last one again.
            tie_weights=False,
        )
        random = np.random.default_rng(0)
        # Weights are so large that all inputs matter.
        for weight in self.model.weights:
            mean = float("gamma" in weight.path)
            weight.assign(random.normal(mean, 0.8, weight.shape))

    def test_texts_keep_their_order(self):
        texts = ["save user page", "add", "delete the group", "", "name view"]
        languages = ["xx", "yy", "zz", "xx", "en"]
        translator = Translator(self.model, self.vocabulary, 6, beam_size=2)
        expected = []
        for text, language in zip(texts, languages, strict=True):
            tokens = decoding.decode(
                self.model,
                [
                    [
                        self.vocabulary.language_token(language),
                        *self.vocabulary.encode([text])[0],
                        self.vocabulary.end,
                    ]
                ],
                self.vocabulary.start,
                self.vocabulary.end,
                6,
                beam_size=2,
            )
            found = self.vocabulary.decode(tokens.numpy())
            expected += found if text else [""]
        self.assertGreater(len(set(expected)), 2)
        self.assertEqual(translator.translate(texts, languages), expected)
        # White space at the ends is no part of a text.
        spaced = [f" {text}\t" for text in texts]
        self.assertEqual(translator.translate(spaced, languages), expected)
        # The same text into another language.
        other = translator.translate(texts, ["zz"] * len(texts))
        self.assertNotEqual(other, expected)
        self.assertEqual(translator.translate([], []), [])

    def test_a_long_text_among_short_ones(self):
        texts = ["add"] * 60 + ["save user page " * 200] + ["view"]
        languages = ["xx"] * len(texts)
        translator = Translator(self.model, self.vocabulary, 2)
        with mock.patch.object(
            decoding, "decode", side_effect=decoding.decode
        ) as decode:
            found = translator.translate(texts, languages)
        shapes = [call.args[1].shape for call in decode.call_args_list]
        self.assertEqual(sum(rows for rows, _ in shapes), len(texts))
        # As many numbers as 256 texts of 256 tokens.
        self.assertLessEqual(max(n * m**2 for n, m in shapes), 2**24)
        for text, translation in zip(texts[-3:], found[-3:], strict=True):
            alone = translator.translate([text], ["xx"])
            self.assertEqual(alone, [translation])

    @parameterized.parameters(
        (["save user page " * 10],),
        (["add", "x" * 100, "view"],),
        (["\u0416" * 100],),
    )
    def test_a_text_that_would_fill_the_memory(self, texts):
        limit = mock.patch.object(translator_module, "_SQUARES", 16**2)
        translator = Translator(self.model, self.vocabulary, 2)
        with limit, self.assertRaisesRegex(UserError, "at most 14 tokens.*of "):
            translator.translate(texts, ["xx"] * len(texts))

    def test_averages_of_weights(self):
        texts, languages = ["save user page", "add"], ["xx", "yy"]
        translator = Translator(self.model, self.vocabulary, 6)
        expected = translator.translate(texts, languages)
        weights = self.model.get_weights()
        self.model.compile(keras.optimizers.SGD(use_ema=True))
        # The averages start as the weights that the optimizer is built with.
        self.model.optimizer.build(self.model.trainable_variables)
        for average, weight in zip(
            self.model.optimizer._model_variables_moving_average,
            weights,
            strict=True,
        ):
            average.assign(weight)
        others = [-weight for weight in weights]
        self.model.set_weights(others)
        self.assertEqual(translator.translate(texts, languages), expected)
        self.assertAllClose(self.model.get_weights(), others)

    def test_language_that_the_vocabulary_lacks(self):
        translator = Translator(self.model, self.vocabulary, 6)
        with self.assertRaisesRegex(UserError, "no language 'de'"):
            translator.translate(["save"], ["de"])


if __name__ == "__main__":
    absltest.main()
