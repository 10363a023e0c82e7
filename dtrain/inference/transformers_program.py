"""What another Python runs to verify an export; it has transformers and PyTorch, and not dtrain.

    python transformers_program.py FOLDER ASKED.json ANSWERED

Writes ANSWERED.npz, the logits of each row, and ANSWERED.json: the version of transformers, tensors that do not match,
the tokens of each text, and the most probable continuation of each prompt.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    transformers.logging.set_verbosity_error()
    folder, asked, answered = (Path(word) for word in sys.argv[1:])
    given: dict[str, Any] = json.loads(asked.read_text())
    how = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    model = model.eval()
    model.generation_config = transformers.GenerationConfig()  # no token ends a text
    tokens, arrays, continued = [], {}, []
    if given["texts"]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in given["texts"]]
    with torch.no_grad():
        for number, (row, prompt) in enumerate(zip(given["rows"], given["prompts"], strict=True)):
            ids = torch.tensor([row], dtype=torch.long)
            arrays[str(number)] = model(ids).logits[0].float().numpy()
            greedy = transformers.GenerationConfig(max_new_tokens=len(row) - prompt, do_sample=False, pad_token_id=0)
            mask = torch.ones_like(ids[:, :prompt])
            whole = model.generate(ids[:, :prompt], attention_mask=mask, generation_config=greedy)
            continued.append(whole[0, prompt:].tolist())
    np.savez(answered.with_suffix(".npz"), **arrays)
    unlike = sorted(f"{what}: {name}" for what, names in info.items() for name in names)
    found = {"transformers": transformers.__version__, "unlike": unlike, "tokens": tokens, "continued": continued}
    answered.with_suffix(".json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
