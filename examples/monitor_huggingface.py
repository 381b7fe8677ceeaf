"""Monitor attention in a Hugging Face model: the largest logit and the entropy of every layer.

    python examples/monitor_huggingface.py                        # a small random GPT-2
    python examples/monitor_huggingface.py --model ./my-model     # a folder with your model

If the largest logit grows from checkpoint to checkpoint and entropies fall towards 0, attention collapses.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from merit_optim.monitor import AttentionMonitor


def main() -> None:
    parser = argparse.ArgumentParser(description="Print attention statistics of a model.")
    parser.add_argument("--model", help="a folder, or a name on the hub; None: a small random GPT-2")
    parser.add_argument("--tokens", type=int, default=64, help="length of the random sequences")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    if arguments.model is None:
        config = GPT2Config(vocab_size=500, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model)
    tokens = torch.randint(model.config.vocab_size, (4, arguments.tokens))

    monitor = AttentionMonitor(model)
    with monitor, torch.no_grad():
        model(tokens)

    reading = monitor.read()
    assert reading is not None
    width = max(len(name) for name in reading.max_logits)
    print(f"{'layer':<{width}}  largest logit  entropy of the sharpest head")
    for name, logits in reading.max_logits.items():
        print(f"{name:<{width}}  {logits.max():13.3f}  {reading.entropy[name].min():28.3f}")


if __name__ == "__main__":
    main()
