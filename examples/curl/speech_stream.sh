#!/usr/bin/env bash
# Sound while it is made, into a file or, with -, into a player: speech_stream.sh - | ffplay -i -
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}" "${MODEL:=preset:toy}"
file=${1:-speech.mp3}

curl --fail-with-body -sS -N -o "$file" "$BASE_URL/v1/audio/speech" \
  -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" -d @- <<END
{
  "model": "$MODEL",
  "input": "Good morning.",
  "voice": "Chelsie",
  "response_format": "mp3",
  "stream_format": "audio"
}
END
