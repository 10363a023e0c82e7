"""Conversations to packed rows: dtrain's whole way from the file to the cache, and `tokenizers` alone on their texts.

Both tokenise the same conversations with the same tokenizer, in turn; the rival reads nothing and keeps nothing. CPU
time is compared, with one thread in `tokenizers`, so that it is time per core.

    python benchmarks/tokenise.py FILE TOKENIZER      target: at least 0.9 of the rival's speed
"""

import os
import statistics
import sys
import tempfile
import time

os.environ["RAYON_NUM_THREADS"] = "1"
import numpy as np

from dtrain.data.chat import Chat
from dtrain.data.conversations import conversation
from dtrain.data.records import record_files, records

ROUNDS = 5


def main() -> None:
    """Print megabytes of text per CPU second of both, and the ratio."""
    file, tokenizer = sys.argv[1:]
    data = Chat(files=(file,), length=2048, tokenizer=tokenizer, template="chatml", test=0.0)
    template, tokenizer = data.chat_template(), data.open_tokenizer()
    read = [conversation(record, {}) for path in record_files((file,)) for record in records(path)]
    texts = [template.rendered(one.messages, one.where).text for one in read]
    size = sum(len(text.encode()) for text in texts) / 1e6
    spans = [(text, ((len(text) // 2, len(text)),)) for text in texts]
    taken: dict[str, list[float]] = {"dtrain": [], "marked": [], "tokenizers": []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            start = time.process_time()
            rows = Chat(**vars(data) | {"cache": cache}).open("train")
            taken["dtrain"].append(time.process_time() - start)
        start = time.process_time()
        for _tokens in tokenizer.encode_with_spans(spans):
            pass
        taken["marked"].append(time.process_time() - start)
        start = time.process_time()
        encoded = tokenizer._tokenizer.encode_batch(texts, add_special_tokens=False)
        tokens = np.concatenate([np.asarray(one.ids) for one in encoded])
        taken["tokenizers"].append(time.process_time() - start)
    pairs = {who: list(zip(taken["tokenizers"], taken[who], strict=True)) for who in ("dtrain", "marked")}
    ratio = {who: statistics.median(theirs / ours for theirs, ours in times) for who, times in pairs.items()}
    speed = {who: size / statistics.median(times) for who, times in taken.items()}
    print(
        f"{len(texts):,} conversations, {size:.1f} MB, {len(tokens):,} tokens; rows {rows.filled:.1%} filled\n"
        f"tokenizers, encode_batch alone      {speed['tokenizers']:.2f} MB a CPU second\n"
        f"dtrain, tokens with what counts     {speed['marked']:.2f} MB a CPU second, {ratio['marked']:.2f}x\n"
        f"dtrain, from the file to packed rows {speed['dtrain']:.2f} MB a CPU second, {ratio['dtrain']:.2f}x"
    )


if __name__ == "__main__":
    main()
