#!/usr/bin/env bash
# Tries the oldest and the newest libraries that pyproject.toml allows and that need no other torch, and whether exports
# load and generate under transformers 4.57. Each set goes into a temporary folder in front of the environment's packages.
# A round whose versions are the environment's is left out: test.sh runs all tests with those.
set -euo pipefail
EXTRAS=dev source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset PYTHONDONTWRITEBYTECODE
own="$ROOT${PYTHONPATH:+:$PYTHONPATH}" # this clone's code, in whatever environment
folders=$(mktemp -d)
trap 'rm -rf "$folders"' EXIT

libraries=(transformers peft datasets huggingface_hub tokenizers)
tests=(
    tests/model/test_{ordinary_form,packed_form,source,trained}.py
    tests/config/test_{load,rules,words,error_report,deepspeed_json,batch_settings,shipped_configs}.py
    tests/data/test_{local_formats,sources,hub_reading,sft}.py
    tests/tokenizer tests/evaluate/test_{generation,text_metrics}.py
    tests/checkpoint/test_{export,adapters}.py tests/test_tested_versions.py
)

into() { # FOLDER REQUIREMENT...: without what these need, which the environment has
    python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target "$@"
}

installed() { # [PATH]: the versions there
    PYTHONPATH="${1:+$1:}$own" python - "${libraries[@]}" pydantic <<'END_PYTHON'
import sys
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in sys.argv[1:]))
END_PYTHON
}

grep -vE '^(huggingface-hub|pydantic|pydantic-core)==' constraints.txt >"$folders/constraints.txt"
failed=0
for which in oldest newest; do
    folder="$folders/$which"
    PYTHONPATH="$own" python scripts/dev/requirements.py "$which" "${libraries[@]}" >"$folders/$which.txt"
    into "$folder" --requirement "$folders/$which.txt"
    # These two bring what the environment need not have: pydantic's core of the same version, a client for HTTP.
    PYTHONPATH="$own" python scripts/dev/requirements.py "$which" pydantic huggingface_hub >"$folders/$which.txt"
    python -m pip install --quiet --disable-pip-version-check --no-compile --target "$folder" --upgrade \
        --constraint "$folders/constraints.txt" --requirement "$folders/$which.txt"
    echo "=== $which: $(installed "$folder")"
    if [ "$(installed "$folder")" = "$(installed)" ]; then
        echo "left out: these are the environment's own versions"
        continue
    fi
    PYTHONPATH="$folder:$own" python -m pytest --color=no -q -n 2 --dist loadfile -p no:cacheprovider \
        -m 'not distributed and not launch and not hosts' "$@" "${tests[@]}" || failed=1
done

echo "=== exports under transformers 4.57"
into "$folders/4.57" 'transformers==4.57.6' 'huggingface_hub>=0.34,<1' 'tokenizers>=0.22,<0.23.1'
PYTHONPATH="$own" DS_ENCDEC_OTHER_TRANSFORMERS="$folders/4.57" \
    python -m pytest --color=no -q -p no:cacheprovider tests/checkpoint/test_export.py -k another_version || failed=1
exit "$failed"
