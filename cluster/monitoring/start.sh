#!/usr/bin/env bash
# Watch a Ray on this machine with Prometheus and Grafana, until Ctrl-C:
#
#     cluster/monitoring/start.sh [RAY_FOLDER]      # Ray's --temp-dir; default: ${RAY_TMPDIR:-/tmp}/ray
#
# Uses `prometheus` and `grafana` if both are installed, otherwise containers (docker compose), otherwise Prometheus alone.
# Both listen on 127.0.0.1 only. PROMETHEUS_PORT and GRAFANA_PORT replace 9090 and 3000; GRAFANA_HOME is the folder of
# Grafana's own files. The data is removed at the end.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export RAY_FOLDER=${1:-${RAY_TMPDIR:-/tmp}/ray}
if [[ ! -e $RAY_FOLDER/prom_metrics_service_discovery.json ]]; then
    echo "'$RAY_FOLDER' is not the folder of a running Ray: start the run first, or give Ray's --temp-dir" >&2
    exit 2
fi
RAY_FOLDER=$(realpath "$RAY_FOLDER")

work=$(mktemp -d)
chmod 755 "$work" # for Prometheus in a container, which runs as another user
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

export PROMETHEUS_PORT=${PROMETHEUS_PORT:-9090} PROMETHEUS_CONFIG=$work/prometheus.yml
sed "s|/tmp/ray/|$RAY_FOLDER/|" "$here/prometheus.yml" >"$PROMETHEUS_CONFIG"

set -a
source "$here/grafana/settings.env"
GF_SERVER_HTTP_PORT=${GRAFANA_PORT:-3000}
RAYFED_DASHBOARDS=$here/grafana/dashboards
GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH=$here/grafana/dashboards/rayfed.json
GF_PATHS_PROVISIONING=$here/grafana/provisioning
set +a

has() { command -v "$1" >/dev/null; }
run_prometheus() {
    prometheus --config.file="$PROMETHEUS_CONFIG" --storage.tsdb.path="$work/prometheus" \
        --web.listen-address="127.0.0.1:$PROMETHEUS_PORT" --log.level=warn &
    echo "Prometheus: http://127.0.0.1:$PROMETHEUS_PORT"
}

if has prometheus && has grafana; then
    run_prometheus
    GF_PATHS_DATA=$work/grafana GF_PATHS_LOGS=$work/grafana GF_LOG_LEVEL=warn \
        grafana server --homepath "${GRAFANA_HOME:-/usr/share/grafana}" &
    echo "Grafana: http://127.0.0.1:$GF_SERVER_HTTP_PORT"
elif docker compose version >/dev/null 2>&1 && docker info >/dev/null 2>&1; then
    echo "Prometheus: http://127.0.0.1:$PROMETHEUS_PORT, Grafana: http://127.0.0.1:$GF_SERVER_HTTP_PORT, in containers"
    trap 'docker compose --file "$here/compose.yaml" down; rm -rf "$work"' EXIT
    docker compose --file "$here/compose.yaml" up --quiet-pull &
elif has prometheus; then
    echo "neither Grafana nor Docker is installed: Prometheus runs without panels" >&2
    run_prometheus
else
    echo "install prometheus and grafana, or Docker with its compose plugin" >&2
    exit 1
fi
wait -n # until one of them ends, or Ctrl-C
