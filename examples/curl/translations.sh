#!/usr/bin/env bash
# What is said, in another language: translations.sh [SOUND]
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}" "${MODEL:=preset:toy}"
sound=${1:-$(dirname "$0")/../speech.wav}

curl --fail-with-body -sS "$BASE_URL/v1/audio/translations" \
  -H "Authorization: Bearer $API_KEY" -F "model=$MODEL" -F "file=@$sound" -F to_language=fr
echo
