"""Runs one server: keeps its log, records what runs, and where there is no systemd restarts it and ends it.

    serve.py run   --state FILE --log FILE [--fingerprint TEXT] -- COMMAND...     under systemd
    serve.py start ... [--replace] -- COMMAND...                                  detached, restarted on failure
    serve.py keep  ... -- COMMAND...                                              the same in this process
    serve.py stop|status --state FILE                                             one JSON object on stdout
    serve.py gate  --log FILE --port N [--gpu-share F]                            exit 1 while port or GPUs are taken

Standard library only, Python >= 3.8: it runs on the target. Processes are known by process id with start time, and by the
session that they were started in, never by name.
"""

import argparse
import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import time


def boot_id():
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def stat_of(pid):
    """(state, parent, session, start in clock ticks since boot), or None when there is no such process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19])


def alive(pid, start):
    found = stat_of(pid)
    return found is not None and found[0] not in "ZX" and found[3] == start


def same_boot(state, path):
    """Whether the record is of this boot of the machine: by the boot's id, or because its process is there.

    A service manager may show its units another boot's id than a login sees (a container's, with protected kernel tunables).
    """
    if state["boot_id"] == boot_id():
        return True
    try:
        with open("/proc/%d/cmdline" % state["pid"], "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return os.fsencode(path) in words and alive(state["pid"], state["start"])


def processes():
    for name in os.listdir("/proc"):
        if name.isdigit():
            found = stat_of(int(name))
            if found is not None and found[0] not in "ZX":
                yield int(name), found


def family(root):
    """The processes below ``root``, which as subreaper inherits the orphans."""
    table = dict(processes())
    members, grown = {root}, True
    while grown:
        more = {pid for pid, found in table.items() if found[1] in members} - members
        members |= more
        grown = bool(more)
    return {pid: table[pid][3] for pid in members - {root} if pid in table}


def leftovers(state):
    """Members of the recorded session: all that is left when the runner itself was killed. A session's number is not given
    out again while a member lives; a leader with another start time says that it was."""
    leader = stat_of(state["pid"])
    if leader is not None and leader[3] != state["start"]:
        return {}
    return {
        pid: found[3]
        for pid, found in processes()
        if found[2] == state["session"] and found[3] >= state["start"] and pid != os.getpid()
    }


def send(members, number):
    for pid, start in members.items():
        if alive(pid, start):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass


def end(find, grace_s):
    """TERM, wait, KILL what is left. True when nothing is left."""
    send(find(), signal.SIGTERM)
    limit = time.monotonic() + grace_s
    while time.monotonic() < limit and find():
        time.sleep(0.1)
    limit = time.monotonic() + 10
    while find() and time.monotonic() < limit:
        send(find(), signal.SIGKILL)
        time.sleep(0.1)
    return not find()


def read_state(path):
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def write_state(path, state):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = "%s.%d.part" % (path, os.getpid())
    with open(part, "w") as file:
        json.dump(state, file)
    os.replace(part, path)


SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")


def secrets_of(env_file, command):
    """Values that no log may hold: those of variables that are named like secrets, and of the server's own secret file."""
    try:
        pairs = env_from(env_file)
    except OSError:
        pairs = {}
    found = {value for name, value in pairs.items() if any(word in name.upper() for word in SECRET)}
    if "--config" in command[:-1]:
        try:
            with open(command[command.index("--config") + 1]) as file:
                found |= {
                    line.partition(":")[2].strip().strip("\"'") for line in file if "key" in line.partition(":")[0]
                }
        except OSError:
            pass
    # A short value would blot out ordinary text.
    return sorted((value.encode() for value in found if len(value) >= 6), key=len, reverse=True)


class Log:
    """A log file with size cap: ``x.log`` moves to ``x.log.1`` and so on, at every start and past ``limit`` bytes."""

    def __init__(self, path, keep, limit, secrets=()):
        self.path, self.keep, self.limit, self.secrets = path, keep, limit, secrets
        self.held = b""
        self.file = None
        self.lost, self.error = 0, ""
        self.size = 0
        # A log that cannot be written is no reason not to serve.
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.exists(path) and os.path.getsize(path):
                self.rotate()
            self.open()
        except OSError as error:
            self.error = str(error)

    def rotate(self):
        if self.file is not None:
            os.close(self.file)
            self.file = None
        for number in range(self.keep - 1, 0, -1):
            older = "%s.%d" % (self.path, number)
            if os.path.exists(older):
                os.replace(older, "%s.%d" % (self.path, number + 1))
        os.replace(self.path, self.path + ".1")

    def open(self):
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        self.size = os.fstat(self.file).st_size

    def take(self, data, last=False):
        """Write output of the server with its secrets blotted out. One may be cut in two between reads: so many bytes of an
        unfinished line are held back until the rest comes, or nothing comes."""
        if not self.secrets:
            return self.write(data)
        data = self.held + data
        whole = len(data) if last else data.rfind(b"\n") + 1
        if not last and len(data) - whole > 65536:
            whole = len(data) - len(self.secrets[0])
        out, self.held = data[:whole], data[whole:]
        for value in self.secrets:
            out = out.replace(value, b"***")
        if out:
            self.write(out)

    def write(self, data):
        # A full disk must not stop the server: what cannot be written is dropped, and counted.
        try:
            if self.file is None:
                self.open()
            if self.lost:
                os.write(self.file, b"[serve] log: %d bytes lost: %s\n" % (self.lost, self.error.encode()))
                self.lost, self.error = 0, ""
            view = memoryview(data)
            while view:
                view = view[os.write(self.file, view) :]
            self.size += len(data)
            if self.size >= self.limit and data.endswith(b"\n"):
                self.rotate()
                self.open()
        except OSError as error:
            self.lost += len(data)
            self.error = str(error)

    def say(self, text):
        self.write(("[serve %s] %s\n" % (time.strftime("%Y-%m-%d %H:%M:%S"), text)).encode())


def meeting(command):
    """Variables by which a server of several hosts is reached by the others: on many hosts their own name stands for the
    loopback, and with it what SGLang and gloo take for their address. Empty for a server of one host."""
    import fcntl
    import socket
    import struct

    value = {word: command[at + 1] for at, word in enumerate(command[:-1])}
    if value.get("--nnodes", "1") == "1" or "--dist-init-addr" not in value:
        return {}
    address, _, port = value["--dist-init-addr"].rpartition(":")
    try:
        family, kind, _, _, first = socket.getaddrinfo(address.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as toward:
            # Nothing is sent: the kernel says which address of ours leads there.
            toward.connect(first)
            found = {"SGLANG_HOST_IP": toward.getsockname()[0]}
            for _, name in socket.if_nameindex() if family == socket.AF_INET else ():
                try:
                    SIOCGIFADDR = 0x8915
                    answer = fcntl.ioctl(toward.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:
                    continue
                if socket.inet_ntoa(answer[20:24]) == found["SGLANG_HOST_IP"]:
                    found["GLOO_SOCKET_IFNAME"] = name
    except (OSError, ValueError):
        return {}
    return found


def memory_kills():
    """(this process's control group of memory, how many of its processes the kernel killed for memory)"""
    group, folders, file = "", ("/sys/fs/cgroup",), "memory.events"
    try:
        with open("/proc/self/cgroup") as rows:
            for row in rows:
                _, names, path = row.rstrip("\n").split(":", 2)
                if "memory" in names.split(","):  # version 1
                    group, folders, file = path, ("/sys/fs/cgroup", "memory"), "memory.oom_control"
                    break
                if not names:
                    group = path
        with open(os.path.join(*folders, group.lstrip("/"), file)) as counts:
            found = dict(line.split() for line in counts)
        return group, int(found.get("oom_kill", 0))
    except (OSError, ValueError):
        return group, 0


def prctl(option, value):
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Runner:
    """Runs the command, once or until told to stop."""

    def __init__(self, options):
        self.options = options
        self.child = None
        self.stopping = False
        self.restarts = 0
        secrets = secrets_of(options.env_file, options.command) if options.env_file else ()
        self.log = Log(options.log, options.keep, options.max_mib << 20, secrets)
        signal.signal(signal.SIGTERM, self.on_stop)
        signal.signal(signal.SIGINT, self.on_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def on_stop(self, number, frame):
        self.stopping = True
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()

    def record(self, **more):
        pid = os.getpid()
        state = {
            "pid": pid,
            "start": stat_of(pid)[3],
            "session": os.getsid(0),
            "boot_id": boot_id(),
            "fingerprint": self.options.fingerprint,
            "command": self.options.command,
            "log": self.options.log,
            "since": time.time(),
            "restarts": self.restarts,
        }
        try:
            write_state(self.options.state, dict(state, **more))
        except OSError as error:  # a full disk: the server runs on, under the record that is there
            self.log.say("state not recorded: %s" % error)

    def once(self):
        """Run the command to its end, its output going to the log. Its exit code."""
        parent = os.getpid()

        def tie():
            # A killed runner takes the server with it, rather than leave one that nobody knows of.
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        self.log.say("start: %s" % " ".join(self.options.command))
        killed = dict([memory_kills()])
        try:
            self.child = subprocess.Popen(
                self.options.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self.options.cwd,
                # What the user sets wins.
                env=dict(meeting(self.options.command), **os.environ),
                preexec_fn=tie,
            )
        except OSError as error:
            self.log.say("cannot start: %s" % error)
            return 127
        self.record(server=self.child.pid)
        if self.stopping:
            self.child.terminate()
        self.pump(self.child)
        self.log.take(b"", last=True)
        code = self.child.wait()
        self.log.say("ended with %d%s" % (code, " as asked" if self.stopping else ""))
        group, kills = memory_kills()
        if code == -9 and not self.stopping and kills > killed.get(group, 0):
            self.log.say(
                "memory cgroup out of memory: %d processes killed in %s" % (kills - killed.get(group, 0), group)
            )
        if not end(lambda: family(parent), 5 if not self.stopping else self.options.grace):
            self.log.say("processes are left: %s" % sorted(family(parent)))
        self.reap()
        if self.stopping:
            return 0
        if code:
            self.go_back()
        return code if code >= 0 else 128 - code

    def go_back(self):
        """A release that ends before it was proved gives way to the one that was: this process becomes its runner."""
        if not self.options.release or not self.options.current:
            return
        proved = os.path.basename(os.path.realpath(self.options.current))
        config = os.path.join(os.path.realpath(self.options.current), "config")
        if proved == self.options.release or not os.path.isdir(config):
            return
        try:
            with open(os.path.join(config, "launch.json")) as file:
                launch = json.load(file)
            argv = [str(word) for word in launch["argv"]]
            action = argv.index("start") if "start" in argv[:3] else argv.index("run")
            argv[action] = self.options.action
            if "--replace" in argv[:4]:
                argv.remove("--replace")
            cut = argv.index("--")
            env = dict(os.environ)
            for name in env_from(self.options.env_file) if self.options.env_file else ():
                env.pop(name, None)
            env.update(env_from(argv[argv.index("--env-file", 0, cut) + 1]))
        except (OSError, ValueError, KeyError):
            return
        self.log.say("release %s ended before it was proved: going back to %s" % (self.options.release, proved))
        if self.options.action == "start":
            # Already detached: run on in this process, without a second one.
            argv[action] = "keep"
        try:
            os.chdir("/")
            os.execve(argv[0], argv, env)
        except OSError as error:
            self.log.say("cannot go back: %s" % error)

    def pump(self, child):
        """Copy output until the server has ended; a grandchild that keeps the pipe open does not hold this up."""
        import select

        fd = child.stdout.fileno()
        limit = None
        while True:
            if child.poll() is None:
                if self.stopping:
                    limit = limit or time.monotonic() + self.options.grace
                    if time.monotonic() > limit:
                        child.kill()
            ready = select.select([fd], [], [], 0.5)[0]
            if ready:
                data = os.read(fd, 65536)
                if not data:
                    while child.poll() is None:
                        if self.stopping and limit and time.monotonic() > limit:
                            child.kill()
                        time.sleep(0.1)
                        if self.stopping:
                            limit = limit or time.monotonic() + self.options.grace
                    return
                self.log.take(data)
            elif child.poll() is not None:
                return
            else:
                self.log.take(b"", last=True)

    def reap(self):
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    return
            except OSError as error:
                if error.errno == errno.ECHILD:
                    return
                raise

    def keep_running(self):
        """Restart on failure, with growing pauses; give up after ``burst`` failures within ``interval`` seconds."""
        failures = []
        while True:
            # A port or a GPU that another process holds is no reason to load a model first.
            code = 0
            if self.options.port or self.options.gpu_share:
                self.record(waiting=True)
                code = gate(self.options, lambda: self.stopping)
            code = code or self.once()
            if self.stopping or code == 0:
                return code
            now = time.monotonic()
            failures = [moment for moment in failures if now - moment < self.options.interval] + [now]
            if len(failures) >= self.options.burst:
                self.log.say("given up after %d failures in %d s" % (len(failures), self.options.interval))
                self.record(failed=True, exit_code=code)
                return code
            limit = now + min(60.0, self.options.delay * 2 ** (len(failures) - 1))
            self.record(exit_code=code, waiting=True)
            while time.monotonic() < limit and not self.stopping:
                time.sleep(0.1)
            if self.stopping:
                return 0
            self.restarts += 1


def port_holder(port):
    """(inode, pid, command) of what listens on the port; None when it is free. pid 0: of another account."""
    inode = None
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(name) as file:
                rows = [row.split() for row in file.read().splitlines()[1:]]
        except OSError:
            continue
        for row in rows:
            if row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port:
                inode = row[9]
    if inode is None:
        return None
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            for fd in os.listdir("/proc/%s/fd" % name):
                if os.readlink("/proc/%s/fd/%s" % (name, fd)) == "socket:[%s]" % inode:
                    with open("/proc/%s/cmdline" % name, "rb") as file:
                        return inode, int(name), file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            continue
    return inode, 0, "of another account"


def gpus_taken(share):
    """Complaints about GPUs (of CUDA_VISIBLE_DEVICES, else all) of which less than ``share`` of the memory is free."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return ["GPUs cannot be looked at: %s" % error]
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        return ["GPUs cannot be looked at: %s" % text.strip()[:300]]
    wanted = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4 or not cells[2].isdigit() or not cells[3].isdigit():
            continue
        if wanted and cells[0] not in wanted and not any(cells[1].startswith(word) for word in wanted):
            continue
        used, total = int(cells[2]), int(cells[3])
        if total - used < share * total:
            found.append("GPU %s: an earlier or foreign process holds %d of %d MiB" % (cells[0], used, total))
    return found


def gate(options, stopping=lambda: False):
    """0 when the port and the GPUs are free, waiting ``wait`` seconds for a server that is just ending; else 1, with the
    reason on stderr and at the end of the log."""
    limit = time.monotonic() + options.wait
    while True:
        complaints = []
        holder = port_holder(options.port) if options.port else None
        if holder is not None:
            complaints.append("port %d is in use by pid %d: %s" % (options.port, holder[1], holder[2][:200]))
        if options.gpu_share > 0:
            complaints += gpus_taken(options.gpu_share)
        if not complaints or time.monotonic() >= limit or stopping():
            break
        time.sleep(0.5)
    for line in complaints:
        text = "[serve %s] not started: %s\n" % (time.strftime("%Y-%m-%d %H:%M:%S"), line)
        sys.stderr.write(text)
        try:
            os.makedirs(os.path.dirname(options.log), exist_ok=True)
            with open(options.log, "a") as file:
                file.write(text)
        except OSError:
            pass
    return 1 if complaints else 0


def detach():
    """Leave terminal, session and every inherited descriptor. True in the detached process."""
    if os.fork():
        return False
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, 4096)
    return True


def env_from(path):
    """systemd's EnvironmentFile as we write it: NAME="value" with backslash escapes."""
    found = {}
    with open(path) as file:
        for line in file:
            name, mark, value = line.rstrip("\n").partition("=")
            if not mark or line.startswith("#"):
                continue
            if value[:1] == '"' and value[-1:] == '"':
                text, out, position = value[1:-1], [], 0
                while position < len(text):
                    if text[position] == "\\" and position + 1 < len(text):
                        position += 1
                    out.append(text[position])
                    position += 1
                value = "".join(out)
            found[name] = value
    return found


def status(path):
    """The record, and what it means now: ``running``: the runner is there; ``serves``: fingerprint of what it serves, empty
    when it serves nothing, as between two tries, when its log is that of the try that failed."""
    state = read_state(path)
    if state is None:
        return {"running": False, "known": False, "serves": ""}
    here = same_boot(state, path)
    running = here and alive(state["pid"], state["start"])
    orphans = leftovers(state) if here and not running and state["session"] == state["pid"] else {}
    running = running and not state.get("failed")
    serves = state.get("fingerprint") or "" if running and not state.get("waiting") else ""
    return dict(state, running=running, serves=serves, known=True, orphans=sorted(orphans))


def start(options):
    found = status(options.state)
    if found["running"] and not options.replace:
        return dict(found, started=False)
    before = read_state(options.state)
    if detach():
        code = 1
        try:
            # Out of the caller's reach from here on: what is ended now is followed by a start.
            if found["running"]:
                stop(options)
            elif found.get("orphans"):
                end(lambda: leftovers(before), options.grace)
            code = keep(options)
        finally:
            os._exit(code & 255)
    limit = time.monotonic() + 2 * options.grace + 30
    while time.monotonic() < limit:
        state = read_state(options.state)
        if state is not None and (before is None or state["since"] != before["since"] or state["pid"] != before["pid"]):
            return dict(status(options.state), started=True)
        time.sleep(0.05)
    return dict(status(options.state), started=False)


def keep(options):
    """Run in this process, restarted on failure."""
    if options.env_file:
        os.environ.update(env_from(options.env_file))
    return Runner(options).keep_running()


def stop(options):
    state = read_state(options.state)
    found = status(options.state)
    here = state is not None and same_boot(state, options.state)
    if not here or not (alive(state["pid"], state["start"]) or found["orphans"]):
        return dict(found, stopped=False, left=[])
    send({state["pid"]: state["start"]}, signal.SIGTERM)
    limit = time.monotonic() + options.grace + 20
    while alive(state["pid"], state["start"]) and time.monotonic() < limit:
        time.sleep(0.05)
    own_session = state["session"] == state["pid"]
    clean = end(lambda: leftovers(state), options.grace) if own_session else not alive(state["pid"], state["start"])
    return dict(status(options.state), stopped=clean, left=sorted(leftovers(state)) if own_session else [])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("run", "start", "keep", "stop", "status", "gate"))
    parser.add_argument("--state", default="")
    parser.add_argument("--log", default="")
    parser.add_argument("--keep", type=int, default=5)
    parser.add_argument("--max-mib", type=int, default=64)
    parser.add_argument("--fingerprint", default="")
    parser.add_argument("--env-file", default="")
    parser.add_argument("--replace", action="store_true")
    parser.add_argument("--release", default="")
    parser.add_argument("--current", default="")
    parser.add_argument("--cwd", default="/")
    parser.add_argument("--grace", type=float, default=30)
    parser.add_argument("--delay", type=float, default=5)
    parser.add_argument("--burst", type=int, default=4)
    parser.add_argument("--interval", type=float, default=1800)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--gpu-share", type=float, default=0)
    parser.add_argument("--wait", type=float, default=60)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.command = words[cut + 1 :]
    if options.action in ("run", "start", "keep") and not (options.command and options.log):
        parser.error("a log and a command are needed")
    if options.action == "gate":
        if not options.log:
            parser.error("a log is needed")
        return gate(options)
    if not options.state:
        parser.error("a state file is needed")
    if options.action == "run":
        return Runner(options).once()
    if options.action == "keep":
        return keep(options)
    print(json.dumps({"start": start, "stop": stop, "status": lambda o: status(o.state)}[options.action](options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
