#!/usr/bin/env bash
# Token ids as a text: detokenize.sh [IDS], such as 1,2,3
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}" "${MODEL:=preset:toy}"
tokens=${1:-1,2,3}

curl --fail-with-body -sS "$BASE_URL/detokenize" \
  -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" -d @- <<END
{
  "model": "$MODEL",
  "tokens": [$tokens]
}
END
echo
