#!/usr/bin/env bash
# Opens a lesson and its exercises in JupyterLab, in a headless Chromium, and uses them as a reader does: see lab.mjs.
# Usage: tests/browser/run.sh [LESSON [FOLDER FOR SCREENSHOTS]]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
lesson=${1:-02_ppo}
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
if [ -z "$browser" ] || ! command -v npm > /dev/null || ! command -v node > /dev/null; then
    echo "Skipped: the browser test needs Chromium, node and npm."
    exit 0
fi

work=$(mktemp -d)
shots=${2:-$work/shots}
mkdir -p "$shots" "$work/course" "$work/settings/@jupyterlab/notebook-extension" "$work/settings/@jupyterlab/apputils-extension"
trap 'kill "$server" 2> /dev/null || true; wait 2> /dev/null || true; rm -rf "$work"' EXIT
cp -r "$root/notebooks" "$root/exercises" "$root/solutions" "$work/course" # what is run here must not change those
echo '{"windowingMode": "none"}' > "$work/settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
echo '{"fetchNews": "false", "checkForUpdates": false}' > "$work/settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
npm install --silent --no-fund --no-audit --prefix "$work/node" playwright-core > /dev/null

port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
RLCOURSE_PROFILE=smoke JUPYTERLAB_SETTINGS_DIR="$work/settings" python -m jupyterlab --no-browser \
    --expose-app-in-browser --ip=127.0.0.1 --port="$port" --allow-root --ServerApp.root_dir="$work/course" \
    --IdentityProvider.token= --ServerApp.password= > "$work/server.log" 2>&1 &
server=$!
for _ in $(seq 60); do
    if python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$port/api')" 2> /dev/null; then break; fi
    sleep 1
done

node "$root/tests/browser/lab.mjs" "$work/node" "$browser" "http://127.0.0.1:$port" "$work/course" "$lesson" "$shots"
