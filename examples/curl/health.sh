#!/usr/bin/env bash
# Whether the HTTP process lives, whether all stages serve, and what was counted, for Prometheus.
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}"

curl --fail-with-body -sS "$BASE_URL/health" -H "Authorization: Bearer $API_KEY"
echo
curl --fail-with-body -sS "$BASE_URL/ready" -H "Authorization: Bearer $API_KEY"
echo
curl --fail-with-body -sS "$BASE_URL/metrics" -H "Authorization: Bearer $API_KEY"
