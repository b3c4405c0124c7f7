#!/usr/bin/env bash
# The model that is served: its id, its voices and its stages.
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}" "${MODEL:=preset:toy}"

curl --fail-with-body -sS "$BASE_URL/v1/models" -H "Authorization: Bearer $API_KEY"
echo
curl --fail-with-body -sS "$BASE_URL/v1/models/$MODEL" -H "Authorization: Bearer $API_KEY"
echo
