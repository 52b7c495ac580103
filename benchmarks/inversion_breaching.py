# SPDX-License-Identifier: Apache-2.0
"""The attack of `breaching` 0.1.2 on one gradient, in its own process and environment: prints one line of JSON.

python inversion_breaching.py MODEL BATCH ITERATIONS TOTAL_VARIATION
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
import time
import warnings
from pathlib import Path

import torch
from inversion_fixtures import CLASSES, MEAN, SHAPE, STD, digest, gradient, make_batch, make_model, psnr

warnings.filterwarnings("ignore")


def declare_vision_operators() -> torch.library.Library:
    """Beside a CPU build of torch the compiled half of torchvision cannot load; importing it needs names only."""
    library = torch.library.Library("torchvision", "DEF")
    found = importlib.util.find_spec("torchvision")
    assert found is not None
    assert found.submodule_search_locations is not None
    source = Path(found.submodule_search_locations[0], "_meta_registrations.py").read_text()
    for name in sorted(set(re.findall(r'register_fake\("torchvision::(\w+)"\)', source))):
        with contextlib.suppress(RuntimeError):  # it is there already
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class Metadata:
    """What breaching wants to be told about the data."""

    modality, task, classes, shape = "vision", "classification", CLASSES, SHAPE
    normalize, mean, std = True, tuple(MEAN.flatten().tolist()), tuple(STD.flatten().tolist())
    size = (50_000,)


def main(name: str, batch: int, iterations: int, variation: float) -> None:
    torch.set_num_threads(1)
    keep = declare_vision_operators()
    import breaching

    model, (inputs, labels, images) = make_model(name), make_batch(batch)
    observed = gradient(model, inputs, labels)
    overrides = [
        f"optim.max_iterations={iterations}",
        f"optim.callback={iterations}",
        f"regularization.total_variation.scale={variation}",
    ]
    settings = breaching.get_attack_config("invertinggradients", overrides=overrides)
    setup = {"device": torch.device("cpu"), "dtype": torch.float}
    torch.manual_seed(0)
    attack = breaching.attacks.prepare_attack(model, torch.nn.CrossEntropyLoss(), settings, setup)
    sent = [{"parameters": list(model.parameters()), "buffers": list(model.buffers()), "metadata": Metadata}]
    told = {"num_data_points": batch, "labels": None, "local_hyperparams": None}
    received = [{"gradients": observed, "buffers": None, "metadata": told}]
    begun = time.process_time()
    found, _ = attack.reconstruct(sent, received, {}, dryrun=False)
    seconds = time.process_time() - begun
    del keep
    line = {"psnr": psnr(found["data"][:batch], images), "seconds": seconds, "digest": digest(observed)}
    sys.stdout.write("\n" + json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
