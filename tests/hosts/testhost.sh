#!/usr/bin/env bash
# A real Linux host for tests: a Debian container with systemd as PID 1 and sshd, booted in seconds, fresh each time.
#
#   testhost.sh base                     make the base once (debootstrap, about a minute); nothing when it is there
#   testhost.sh up NAME PORT PUBKEY [--disk] [--netns NS] [--uv FILE]
#                                        boot. The root is an overlay in memory over the base, or with --disk a copy of the base, which a
#                                        reboot keeps. /srv lies on disk either way. sshd listens on 127.0.0.1:PORT, with --netns on all
#                                        addresses of that network namespace. With --uv that uv is in the guest's PATH and installs as pip
#                                        would, hard links out of a cache of the guest's own on /srv. Prints key=value lines. Is up already: prints them again.
#   testhost.sh status NAME              exit 0 and the same lines when it is up, 3 when it is not
#   testhost.sh exec NAME ARGV...        run a command inside, as root, without ssh
#   testhost.sh down NAME                power off and forget it; the base stays. Harmless when it is not there
#
# Users inside: root and tester (sudo without password, lingering), both with PUBKEY. pip inside finds what pip finds outside: its settings are
# written to the guest's /etc/pip.conf and local indexes and wheel folders are bound read-only. No GPU, no pip packages.
# Needs root on Debian or Ubuntu; systemd-container, debootstrap and openssh-client are installed when missing.
set -euo pipefail

cache=${TESTHOST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dflash-testhosts}
base=$cache/base-3
state=$cache/run${TESTHOST_RUN:+-$TESTHOST_RUN}  # two test runs beside each other may use one name

say() { echo "testhost: $*" >&2; }
die() { say "$*"; exit 1; }

need_tools() {
  local tool
  for tool in systemd-nspawn debootstrap ssh-keygen ssh-keyscan nsenter; do
    command -v "$tool" >/dev/null || {
      say "installing systemd-container, debootstrap, openssh-client"
      apt-get update -qq >&2 || true
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        systemd-container debootstrap openssh-client util-linux >&2 || die "cannot install the tools"
      return 0
    }
  done
}

make_base() {
  exec 9>"$cache/base.lock"
  flock 9
  if [ ! -e "$base/.done" ]; then
    local mirror
    mirror=$(cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list 2>/dev/null |
      awk '/^URIs:/ && /debian/ {print $2; exit} /^deb / && /debian/ {for (i = 2; i <= NF; i++) if ($i ~ /^http/) {print $i; exit}}' || true)
    say "making the base, once (log: $cache/debootstrap.log)"
    rm -rf "${base:?}" "$base.new"
    debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,dbus-user-session,libpam-systemd,openssh-server,libnss-myhostname,python3,python3-venv,python3-pip,ca-certificates,iproute2,procps,sudo \
      bookworm "$base.new" ${mirror:+"$mirror"} >"$cache/debootstrap.log" 2>&1 || die "debootstrap failed: $(tail -3 "$cache/debootstrap.log")"
    chroot "$base.new" useradd -m -s /bin/bash tester
    echo 'tester ALL=(ALL) NOPASSWD:ALL' >"$base.new/etc/sudoers.d/tester"
    chmod 440 "$base.new/etc/sudoers.d/tester"
    mkdir -p "$base.new/var/lib/systemd/linger"
    touch "$base.new/var/lib/systemd/linger/tester"
    # debootstrap copies this machine's host name; without one, systemd keeps what nspawn sets.
    rm -f "$base.new/etc/hostname" "$base.new"/etc/ssh/ssh_host_* "$base.new"/var/cache/apt/archives/*.deb
    touch "$base.new/.done"
    mv "$base.new" "$base"
  fi
  flock -u 9
  exec 9>&-
}

# The pip settings of this machine as an INI file for the guest; on fd 3, the folders that they name; on fd 4, the same for uv.
pip_settings() {
  command -v python3 >/dev/null || return 0
  python3 - <<'PY'
import ast, json, os, re, subprocess, sys
from urllib.parse import unquote, urlsplit

keep = {"index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert", "constraint", "timeout", "default-timeout", "proxy", "pre", "prefer-binary"}
many = {"extra-index-url", "find-links", "trusted-host", "constraint"}
values: dict[str, list[str]] = {}
found = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
for line in found.stdout.splitlines():
    name, _, raw = line.partition("=")
    scope, _, key = name.rpartition(".")
    if key not in keep or scope not in ("global", "install", "download", ":env:"):
        continue
    try:
        text = str(ast.literal_eval(raw))
    except (ValueError, SyntaxError):
        continue
    words = text.split() if key in many else [text]
    have = values.setdefault(key, [])
    if key not in many:
        have.clear()
    have += [w for w in words if w not in have]
with os.fdopen(3, "w") as binds:
    for key, words in values.items():
        for word in words:
            path = unquote(urlsplit(word).path) if word.startswith("file:") else word
            if key in ("index-url", "extra-index-url", "find-links", "cert", "constraint") and path.startswith("/") and os.path.exists(path):
                # A simple index links to files beside it (../../files), so that its parent is needed too.
                if re.search(r"/simple/?$", path):
                    path = os.path.dirname(path.rstrip("/"))
                real = os.path.realpath(path)
                binds.write(f"{path}\n")
                if real != path:
                    binds.write(f"{real}\n")
with os.fdopen(4, "w") as uv:
    # System certificates, and all indexes equal, as pip has it.
    uv.write('native-tls = true\ncache-dir = "/srv/uv-cache"\n[pip]\nindex-strategy = "unsafe-best-match"\n')
    for key in ("index-url", "extra-index-url", "find-links", "no-index"):
        if key in values:
            uv.write(f"{key} = {json.dumps(values[key] if key in many else values[key][0])}\n")
print("[global]")
for key, words in values.items():
    print(f"{key} =" + "".join(f"\n    {w}" for w in words) if key in many else f"{key} = {words[0]}")
PY
}

alive() { [ -s "$1/pid" ] && kill -0 "$(cat "$1/pid")" 2>/dev/null && grep -qs nspawn-loop "/proc/$(cat "$1/pid")/cmdline"; }

# PID (here) of the guest's PID 1, if it runs.
init_of() { local n; n=$(pgrep -P "$(cat "$1/pid")" -x systemd-nspawn | head -1) || return 1; pgrep -P "$n" | head -1; }

describe() { cat "$1/about"; }

up() {
  [ $# -ge 3 ] || die "up NAME PORT PUBKEY [--disk] [--netns NS] [--uv FILE]"
  local name=$1 port=$2 key=$3 ns='' disk='' uv='' st=$state/$1 u f
  shift 3
  while [ $# -gt 0 ]; do
    case $1 in
      --netns) ns=${2:?--netns needs a name}; shift 2 ;;
      --disk) disk=1; shift ;;
      --uv) uv=${2:?--uv needs a file}; shift 2 ;;
      *) die "unknown option $1" ;;
    esac
  done
  [[ $name =~ ^[a-z][a-z0-9-]{0,30}$ ]] || die "a name is small letters, digits and dashes, not '$name'"
  [[ $port =~ ^[0-9]+$ ]] || die "a port is a number, not '$port'"
  [ -r "$key" ] || die "cannot read the public key $key"
  [ "$(id -u)" = 0 ] || die "needs root"
  mkdir -p "$cache"
  alive "$st" && { describe "$st"; return 0; }
  need_tools
  make_base
  rm -rf "${st:?}"
  mkdir -p "$st/srv" "$st/ssh" "$st/sshd.d" "$st/keys"
  chmod 755 "$st/srv"
  ssh-keygen -q -t ed25519 -N '' -C "$name" -f "$st/ssh/ssh_host_ed25519_key"
  local addr=127.0.0.1 net=()
  [ -z "$ns" ] || { addr=0.0.0.0; net=(--network-namespace-path="/run/netns/$ns"); }
  printf '%s\n' "Port $port" "ListenAddress $addr" "HostKey /etc/testhost/ssh_host_ed25519_key" \
    "AuthorizedKeysFile /etc/testhost-keys/%u" "PasswordAuthentication no" "UseDNS no" >"$st/sshd.d/testhost.conf"
  for u in root tester; do install -m 644 "$key" "$st/keys/$u"; done

  local binds=(--bind="$st/srv:/srv" --bind-ro="$st/ssh:/etc/testhost" --bind-ro="$st/keys:/etc/testhost-keys" --bind-ro="$st/sshd.d:/etc/ssh/sshd_config.d")
  pip_settings 3>"$st/pip.binds" 4>"$st/uv.toml" >"$st/pip.conf"
  [ ! -s "$st/pip.conf" ] || binds+=(--bind-ro="$st/pip.conf:/etc/pip.conf")
  if [ -n "$uv" ]; then
    install -d -m 777 "$st/srv/uv-cache"
    binds+=(--bind-ro="$uv:/usr/local/bin/uv" --bind-ro="$st/uv.toml:/etc/uv/uv.toml")
  fi
  while IFS= read -r f; do [ ! -e "$f" ] || binds+=(--bind-ro="$f"); done < <(sort -u "$st/pip.binds")
  # This machine's certificate authorities, for indexes behind a proxy of one's own.
  for f in /etc/ssl/certs /usr/local/share/ca-certificates; do [ ! -d "$f" ] || binds+=(--bind-ro="$f"); done

  local root=(-D "$base" --volatile=overlay)
  [ -z "$disk" ] || { cp -a --reflink=auto "$base" "$st/root"; root=(-D "$st/root"); }
  local run=(systemd-nspawn -q "${root[@]}" -M "$name" --hostname="$name" --boot --register=no --keep-unit --console=pipe
    --resolv-conf=copy-host "${net[@]}" "${binds[@]}")
  printf 'name=%s\nport=%s\nbase=%s\nstate=%s\nhostkey=%s\nconsole=%s\n' \
    "$name" "$port" "$base" "$st" "$st/ssh/ssh_host_ed25519_key.pub" "$st/console.log" >"$st/about"
  # nspawn leaves with 133 when the guest asks for a reboot.
  setsid bash -c 'while "$@"; [ $? -eq 133 ]; do :; done' nspawn-loop "${run[@]}" </dev/null >"$st/console.log" 2>&1 &
  echo $! >"$st/pid"
  local scan=(ssh-keyscan -T 1 -p "$port" 127.0.0.1)
  [ -z "$ns" ] || scan=(nsenter --net="/run/netns/$ns" "${scan[@]}")
  for _ in $(seq 120); do
    [ -z "$("${scan[@]}" 2>/dev/null)" ] || { describe "$st"; return 0; }
    alive "$st" || break
    sleep .25
  done
  tail -5 "$st/console.log" >&2
  down "$name"
  die "$name did not come up"
}

down() {
  local st=$state/${1:?down NAME} pid init n
  [ -d "$st" ] || { say "$1 is not there"; return 0; }
  if alive "$st"; then
    pid=$(cat "$st/pid")
    n=$(pgrep -P "$pid" -x systemd-nspawn | head -1 || true)
    init=$(init_of "$st" || true)
    [ -z "$init" ] || kill -s RTMIN+14 "$init" 2>/dev/null || true
    for _ in $(seq 60); do alive "$st" || break; sleep .25; done
    if alive "$st"; then kill -9 "$pid" ${n:+"$n"} 2>/dev/null || true; sleep .5; fi
  fi
  rm -rf --one-file-system "${st:?}"
  rmdir "$state" 2>/dev/null || true
  say "$1 is down"
}

case ${1:-} in
  base) mkdir -p "$cache"; need_tools; make_base; echo "base=$base" ;;
  up) shift; up "$@" ;;
  down) shift; down "$@" ;;
  status) st=$state/${2:?status NAME}; alive "$st" || exit 3; describe "$st" ;;
  exec)
    st=$state/${2:?exec NAME ARGV...}; shift 2
    alive "$st" || die "not up"
    init=$(init_of "$st") || die "no PID 1 inside"
    exec nsenter --target "$init" --mount --uts --ipc --net --pid --root --wd -- "$@" ;;
  *) sed -n '2,/^set /p' "$0" | grep '^#' | cut -c3-; exit 2 ;;
esac
