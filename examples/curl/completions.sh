#!/usr/bin/env bash
# The continuation of a text, without a chat's template.
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}" "${MODEL:=preset:toy}"

curl --fail-with-body -sS "$BASE_URL/v1/completions" \
  -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" -d @- <<END
{
  "model": "$MODEL",
  "prompt": "Once upon a time",
  "max_tokens": 32
}
END
echo
