"""A tokenizer that a person can follow."""

import re


class Pieces:
    """Words with the space before them, punctuation and white space are tokens, as in GPT-2's."""

    pattern = r" ?\w+| ?[^\w\s]+|\s"

    def __init__(self):
        self.pieces = ["<eos>"]
        self.eos_token_id = self.prefix_token_id = 0
        self.beginning = []

    @property
    def stop_token_ids(self):
        return frozenset([self.eos_token_id])

    @property
    def vocab_size(self):
        return len(self.pieces)

    def encode(self, text):
        found = re.findall(self.pattern, text)
        self.pieces += [piece for piece in dict.fromkeys(found) if piece not in self.pieces]
        return [self.pieces.index(piece) for piece in found]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)
