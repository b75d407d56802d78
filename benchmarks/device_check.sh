#!/usr/bin/env bash
# What a machine with an accelerator shows of portable, in one file of results, within six minutes and without a network:
#
#     bash benchmarks/device_check.sh [backend [results.json [seconds]]]
#
# The backend is found if it is not named. Steps: doctor, a model forward and backward, the conformance kit, the quick
# benchmarks with the gate. A step that fails, or a package that is missing, costs its own step alone and is named in
# the results. PYTHON names the interpreter; else it is the first that has torch.
# Exit status 0: every step passed; 1: some did not; 2: nothing could run.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
for python in ${PYTHON:-python3 python}; do
    if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then
        exec "$python" "$root/benchmarks/device_check.py" "$@"
    fi
done
echo "device_check: no Python with torch among: ${PYTHON:-python3 python}; set PYTHON" >&2
exit 2
