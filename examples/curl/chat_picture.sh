#!/usr/bin/env bash
# A question on a picture: chat_picture.sh [PICTURE]
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}" "${MODEL:=preset:toy}"
picture=${1:-$(dirname "$0")/../picture.png}

curl --fail-with-body -sS "$BASE_URL/v1/chat/completions" \
  -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" -d @- <<END
{
  "model": "$MODEL",
  "messages": [{"role": "user", "content": [
    {"type": "text", "text": "What is in this picture?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,$(base64 <"$picture" | tr -d '\n')"}}
  ]}]
}
END
echo
