# Sourced on each node before `ray` and `serve`: the checkout's commands, and what Ray's processes must find in their
# environment. ray_cluster.yaml and deploy/ray_cluster_aws.yaml do so; docs/operate/clusters.md says how the cluster is used.
export PATH="$HOME/omni_cluster/.venv/bin:$PATH"
export RAY_AUTH_MODE=token  # ~/.ray/auth_token, the same on all nodes
export RAY_USAGE_STATS_ENABLED=0
export RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=60
export RAY_health_check_period_ms=1000  # of five checks that a dead node fails: known after 5 s, not 15
export VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-WARNING}"
ulimit -n "$(ulimit -Hn)"  # each client's connection is a file of Serve's proxy
