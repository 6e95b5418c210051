"""List texts that break tokenizers."""

AWKWARD = {
    "emoji": "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 ❤️ 🇫🇷 1️⃣ \U0001fae8",
    "accents composed": "naïve café Ångström Đà Nẵng ﬁ",
    "accents decomposed": "nai\u0308ve cafe\u0301 A\u030angstro\u0308m",
    "scripts": "Привет שלום عربي 你好，世界 こんにちは สวัสดี नमस्ते 한국어",
    "code": "def f(x):\n\treturn {'a': x[0]->b, \"c\": `d`}  # 0xFF != 1e-5;\n\n\n    if(!p||q&&r){/*<b>*/}",
    "digits": "3.14159265358979323846 1234567890123456789012345 1,000,000 ½ ²³ ١٢٣ Ⅷ",
    "leading blanks": "   three blanks   and  two, one at the end ",
    "tabs and line breaks": "\t\ta\r\nb\n\n\nc\u00a0d\u2003e\u3000f\u2028g\x0bh\x85i",
    "contractions": "I'll we've DON'T it's 's 'S ’s can't'd",
    "look-alikes": "a<|endoftext|>b <|endoftext|> <|extratoken_1|><pad></s>[MASK]",
    "control characters": "nul\x00bell\x07esc\x1b[0m\x7f\ufeffmark\u200bzero\u00adsoft",
    "long word": "a" * 3000 + "Donaudampfschiffahrt" * 20,
    "punctuation": "...!?!?——“”‘’…•¿¡ ***###@@@ ~~~ \\\\//",
    "one blank": " ",
}
