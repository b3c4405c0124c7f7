#!/usr/bin/env bash
# A text as token ids.
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}" "${MODEL:=preset:toy}"

curl --fail-with-body -sS "$BASE_URL/tokenize" \
  -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" -d @- <<END
{
  "model": "$MODEL",
  "prompt": "Hello world."
}
END
echo
