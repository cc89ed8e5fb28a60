"""Tokens of Hugging Face's tokenizers of every kind of model, against the Rust crate behind the feature `tokenizers`."""

import torch
from harness import case
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The cat sat on the mat, didn't it?", "", "  two  spaces\nand a line\t", "Zürich 12345 naïve — 猫が 🐈", "aaaa bbbb" * 40,
    "it's we'll THEY'VE I'm", "\u0000\ufeff\u200b odd", "e\u0301 \u00e9 ﬁ Ⅷ",
]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer, trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )


def bert():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer, trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer, trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )


@case
def tokens_of_tokenizers(t):
    """Byte-level BPE, WordPiece and Unigram, with special tokens and without: the same tokens."""
    kinds = {"byte_level": byte_level, "bert": bert, "unigram": unigram}
    t.tell("texts", TEXTS)
    t.tell("kinds", list(kinds))
    for kind, make in kinds.items():
        tokenizer, trainer = make()
        tokenizer.train_from_iterator(TEXTS * 4, trainer)
        if kind == "bert":
            tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
        t.tell(kind, tokenizer.to_str())
        for special in (False, True):
            for i, text in enumerate(TEXTS):
                ids = tokenizer.encode(text, add_special_tokens=special).ids
                t.expect(f"{kind}.{special}.{i}", torch.tensor(ids, dtype=torch.int64))
