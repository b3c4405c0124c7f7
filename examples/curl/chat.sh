#!/usr/bin/env bash
# A question by text, and its answer.
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}" "${MODEL:=preset:toy}"

curl --fail-with-body -sS "$BASE_URL/v1/chat/completions" \
  -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" -d @- <<END
{
  "model": "$MODEL",
  "messages": [{"role": "user", "content": "Hello world."}]
}
END
echo
