#!/usr/bin/env bash
# Installs the package on a machine of SkyPilot's: beside the image's torch where there is one, as ROCm's images have.
set -euo pipefail
if python3 -c 'import torch' 2> /dev/null; then
    python3 -m pip install --no-deps -r requirements-without-torch.txt
    python3 -m pip install --no-deps .
else
    python3 -m pip install '.[train,s3]'
    python3 -m pip install --no-deps mosaicml==0.32.1 mosaicml-streaming==0.13.0
fi
