#!/usr/bin/env bash
# The voices, and other names for them.
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}"

curl --fail-with-body -sS "$BASE_URL/v1/audio/voices" -H "Authorization: Bearer $API_KEY"
echo
