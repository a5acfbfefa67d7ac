"""Write a model of random weights, as every system of `device_engine.py` loads it: config.json and safetensors in bfloat16.

python device_checkpoint.py FOLDER TORCH_DEVICE        (the folder has config.json)
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Make the weights on the device, where it takes no time, and save them."""
    folder, device = sys.argv[1:3]
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    start = time.monotonic()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    print(json.dumps({"parameters": model.num_parameters(), "seconds": time.monotonic() - start}))


if __name__ == "__main__":
    main()
