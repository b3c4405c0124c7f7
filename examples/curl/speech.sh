#!/usr/bin/env bash
# A text that is read aloud, into a file: speech.sh [FILE]
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}" "${MODEL:=preset:toy}"
file=${1:-speech.wav}

curl --fail-with-body -sS -o "$file" "$BASE_URL/v1/audio/speech" \
  -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" -d @- <<END
{
  "model": "$MODEL",
  "input": "Good morning.",
  "voice": "Chelsie",
  "response_format": "wav"
}
END
