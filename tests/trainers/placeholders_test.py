from absl.testing import absltest
from absl.testing import parameterized

from trainers import placeholders


class PlaceholdersTest(parameterized.TestCase):
    @parameterized.parameters(
        ("%(count)s of %(total_count)s", ["%(count)s", "%(total_count)s"]),
        ("%s, %d, %1$s", ["%s", "%d", "%1$s"]),
        ("{name} and {}, {name}", ["{name}", "{}"]),
        ('<a href="%(url)s">Log in</a>', ['<a href="%(url)s">', "</a>"]),
        # In a language without spaces.
        ("%(count)s\u500b %d\uc77c", ["%(count)s", "%d"]),
        # These look like placeholders, but are none.
        ("50% done, 5 < 6 > 3, { a }, 100%, %sure", []),
    )
    def test_find(self, source, expected):
        found = placeholders.find(source)
        self.assertEqual(found, expected)
        masked = placeholders.replace(source, found)
        for x in found:
            self.assertNotIn(x, masked)
        self.assertEqual(placeholders.restore(masked, found), source)

    def test_translation_has_the_symbols_of_the_source(self):
        found = placeholders.find("%(a)s of %(b)s")
        a, b, *_ = placeholders.SYMBOLS
        self.assertEqual(
            placeholders.replace("%(b)s: %(a)s, %(c)s", found),
            f"{b}: {a}, %(c)s",
        )

    def test_symbols_that_a_model_makes_up(self):
        a, b, *_ = placeholders.SYMBOLS
        self.assertEqual(placeholders.restore(f"{b}x{a}", ["{n}"]), "x{n}")

    def test_many(self):
        text = "".join(f"{{{index}}}" for index in range(20))
        found = placeholders.find(text)
        self.assertLen(found, placeholders.NUM_SYMBOLS)
        masked = placeholders.replace(text, found)
        self.assertEqual(masked[16:], "{16}{17}{18}{19}")
        self.assertEqual(placeholders.restore(masked, found), text)


if __name__ == "__main__":
    absltest.main()
