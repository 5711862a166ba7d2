"""`ferry run` from outside: exit codes, output, signals, and that nothing stays behind.

python3 run_test.py FERRY [unittest arguments]
"""

import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

FERRY = os.environ.get("FERRY_CLI", "")
LIMIT = 30 if os.environ.get("CI") == "true" else 150  # seconds: of anything; machines may be slow


def setUpModule():
    if not FERRY:
        raise unittest.SkipTest("give the path of the ferry command (ctest -L cli does)")


def ferry_run(*arguments, **options):
    return subprocess.run(
        [FERRY, "run", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=options.pop("stdin", subprocess.DEVNULL) if "input" not in options else None,
        **options,
    )


def start(*arguments, **options):
    return subprocess.Popen(
        [FERRY, "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        **options,
    )


def shell(script):
    return ["--", "sh", "-c", script]


def runs(pid):
    """True while the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def read_pids(process, count):
    """`count` lines like "[0] pid 123" from the job's output, as {123, ...}."""
    return {int(process.stdout.readline().split()[-1]) for _ in range(count)}


class CommandLine(unittest.TestCase):
    def test_help_and_version(self):
        version = subprocess.run(
            [FERRY, "--version"], capture_output=True, text=True, timeout=LIMIT
        )
        self.assertEqual(version.returncode, 0)
        self.assertRegex(version.stdout, r"^ferry \d+\.\d+\.\d+\n$")
        result = ferry_run("--help")
        self.assertEqual(result.returncode, 0)
        self.assertIn("Usage: ferry run -n N [OPTIONS] -- PROGRAM ARGS\n", result.stdout)
        for word in ("Exit codes", "--keep-going", "--grace", "OMP_NUM_THREADS", "127"):
            self.assertIn(word, result.stdout)

    def test_an_unknown_command_is_named(self):
        for word, answer in (
            ("doctr", "did you mean doctor?"),
            ("docotr", "did you mean doctor?"),
            ("rnu", "did you mean run?"),
            ("benchmark", "the commands are run, doctor, bench, plan, calibrate, simulate, top"),
        ):
            with self.subTest(word=word):
                result = subprocess.run(
                    [FERRY, word, "--", "true"], capture_output=True, text=True, timeout=LIMIT
                )
                self.assertEqual(result.returncode, 2)
                first = result.stderr.splitlines()[0]
                self.assertEqual(first, f"ferry: unknown command '{word}'; {answer}")

    def test_wrong_command_lines_are_refused_with_a_reason(self):
        for arguments, reason in (
            ([], "no number of ranks given: ferry run -n 4 -- "),
            (["-n", "2"], "no program given"),
            (["-n", "2", "--"], "no program given"),
            (["-n", "0", "--", "true"], "--ranks: 0: must be at least 1\n"),
            (["-n", "1025", "--", "true"], "--ranks: 1025: must be at most 1024\n"),
            (["-n", "2", "--grace", "-1", "--", "true"], "--grace: -1: must be at least 0\n"),
            (["-n", "2", "--grace", "1e9", "--", "true"], "must be at most 86400\n"),
            (["-n", "2", "--grace", "1e999", "--", "true"], "must be at most 86400\n"),
            (["-n", "2", "--grace", "soon", "--", "true"], "must be a number of seconds\n"),
            (["-n", "2", "--grace", "nan", "--", "true"], "must be a number of seconds\n"),
            (["-n", "two", "--", "true"], "two"),
            (["-n", "2", "--bogus", "--", "true"], "'--bogus' is no option"),
            (["-n", "2", "--bogus", "true"], "'--bogus' is no option"),
            (["-n", "2", "true", "--", "true"], "the program comes after --"),
            (["-n", "2", "--tty-rank", "2", "--", "true"], "0 ... 1"),
            (["-n", "2", "--port", "70000", "--", "true"], "65535"),
            (["--elastic", "2", "--", "true"], "expected LEAST:MOST"),
            (["--elastic", "3:2", "--", "true"], "1 <= LEAST <= MOST"),
            (["--elastic", "1:2000", "--", "true"], "MOST <= 1024"),
            (["-n", "3", "--elastic", "1:2", "--", "true"], "leave -n out, or give 2"),
            (["--elastic", "", "-n", "2", "--", "true"], "--elastic: got ''"),
            (
                ["--elastic", "1:2", "--port", "65535", "--", "true"],
                "--port: got 65535 beside --elastic; expected 1 ... 65534",
            ),
            (
                ["-n", "2", "--hosts", ",,", "--port", "9", "--", "true"],
                '--hosts: got ",,"',
            ),
            (
                ["-n", "2", "--hosts", "a,b", "--port", "65535", "--", "true"],
                "--port: got 65535 beside --hosts",
            ),
            (["--elastic", "1:2", "--only", "0", "--", "true"], "--only needs --port"),
            (["--elastic", "1:2", "--join", "--", "true"], "--join needs --port"),
            (["--elastic", "1:2", "--port", "23456", "--only", "2", "--", "true"], "of 0 ... 1"),
            (["--elastic", "1:2", "--port", "23456", "--only", "0,0", "--", "true"], "different"),
            (["--elastic", "2:3", "--port", "23456", "--only", "1", "--", "true"], "at least 2"),
            (
                ["--elastic", "1:2", "--hosts", "a,b", "--port", "9", "--only", "0", "--", "true"],
                "--only beside --hosts needs --join",
            ),
            (["-n", "2", "--restarts", "1", "--", "true"], "are for --elastic"),
            (["-n", "2", "--join", "--", "true"], "are for --elastic"),
        ):
            with self.subTest(arguments=arguments):
                result = ferry_run(*arguments)
                self.assertEqual(result.returncode, 2)
                self.assertIn(reason, result.stdout + result.stderr)

    def test_options_after_the_program_belong_to_it(self):
        result = ferry_run("-n", "1", "echo", "-n", "5", "--keep-going")
        self.assertEqual(result.stdout, "[0] 5 --keep-going\n")
        result = ferry_run("-n", "1", "--", "printf", "%s|", "a b", "--", "$HOME")
        self.assertEqual(result.stdout, "[0] a b|--|$HOME|\n")

    def test_a_program_that_cannot_start(self):
        for program, reason in (
            ("no-such-program-here", "not in PATH"),
            ("/no/such/program", "No such file"),
            ("/etc/passwd", "Permission denied"),
        ):
            with self.subTest(program=program):
                result = ferry_run("-n", "3", "--", program)
                self.assertEqual(result.returncode, 127)
                self.assertIn(program, result.stderr)
                self.assertIn(reason, result.stderr)
                self.assertEqual(len(result.stderr.splitlines()), 1)


class Environment(unittest.TestCase):
    def variables(self, *arguments, **options):
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
        names += ["MASTER_PORT", "FERRY_PORT", "FERRY_SECRET", "OMP_NUM_THREADS"]
        script = "echo " + " ".join(f"{name}=${name}" for name in names)
        result = ferry_run(*arguments, *shell(script), **options)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = sorted(result.stdout.splitlines())
        return [dict(pair.split("=", 1) for pair in line.split()[1:]) for line in lines]

    def clean(self, **more):
        dropped = ("FERRY_SECRET", "OMP_NUM_THREADS", "RANK")
        return {k: v for k, v in os.environ.items() if k not in dropped} | more

    def test_what_every_rank_finds(self):
        ranks = self.variables("-n", "3", env=self.clean(RANK="7", MASTER_PORT="1"))
        self.assertEqual([v["RANK"] for v in ranks], ["0", "1", "2"])
        self.assertEqual([v["LOCAL_RANK"] for v in ranks], ["0", "1", "2"])
        for v in ranks:
            self.assertEqual(v["WORLD_SIZE"], "3")
            self.assertEqual(v["LOCAL_WORLD_SIZE"], "3")
            self.assertEqual(v["MASTER_ADDR"], "127.0.0.1")
            self.assertEqual(v["OMP_NUM_THREADS"], "1")
            self.assertGreaterEqual(int(v["MASTER_PORT"]), 1024)
            self.assertNotEqual(v["MASTER_PORT"], v["FERRY_PORT"])
            self.assertRegex(v["FERRY_SECRET"], r"^[0-9a-f]{32}$")
        for name in ("MASTER_PORT", "FERRY_PORT", "FERRY_SECRET"):
            self.assertEqual(len({v[name] for v in ranks}), 1)

    def test_what_is_kept(self):
        env = self.clean(FERRY_SECRET="mine", OMP_NUM_THREADS="5")
        (only,) = self.variables("-n", "1", "--port", "23456", env=env)
        self.assertEqual(only["FERRY_SECRET"], "mine")
        self.assertEqual(only["OMP_NUM_THREADS"], "5")
        self.assertEqual(only["MASTER_PORT"], "23456")
        (only,) = self.variables("-n", "1", env=self.clean())
        self.assertEqual(only["OMP_NUM_THREADS"], "")

    def test_jobs_do_not_meet(self):
        script = "echo $MASTER_PORT $FERRY_PORT $FERRY_SECRET; sleep 0.5"
        jobs = [start("-n", "1", *shell(script), env=self.clean()) for _ in range(6)]
        values = [value for job in jobs for value in job.communicate(timeout=LIMIT)[0].split()[1:]]
        self.assertEqual(len(values), 18)
        self.assertEqual(len(set(values)), 18)

    def test_the_secret_is_never_printed(self):
        for script in ("kill -9 $$", "exit 3", "true"):
            env = self.clean(FERRY_SECRET="deadbeefcafe")
            result = ferry_run("-n", "2", *shell(script), env=env)
            self.assertNotIn("deadbeefcafe", result.stdout + result.stderr)

    def test_several_hosts(self):
        # Of this machine only the first is an address: 192.0.2.0/24 is for documentation.
        hosts = ["--hosts", "127.0.0.1,192.0.2.77", "-n", "2", "--port", "23456"]
        script = "echo $RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $FERRY_PORT $FERRY_HOST"
        secret = os.environ | {"FERRY_SECRET": "hush-hush"}
        result = ferry_run(*hosts, *shell(script), env=secret)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(
            sorted(result.stdout.splitlines()),
            [f"[{rank}] {rank} 4 127.0.0.1 23456 23457 127.0.0.1" for rank in range(2)],
        )
        hosts[1] = "192.0.2.77,127.0.0.1"
        result = ferry_run(*hosts, *shell("echo $RANK $LOCAL_RANK"), env=secret)
        self.assertEqual(sorted(result.stdout.splitlines()), ["[2] 2 0", "[3] 3 1"])
        # What is set is kept: another interface for the rows, a file for the secret.
        given = self.clean(FERRY_HOST="eth7", FERRY_SECRET_FILE="secret.txt")
        script = "echo $FERRY_HOST $FERRY_SECRET_FILE ${FERRY_SECRET-unset}"
        result = ferry_run(*hosts, *shell(script), env=given)
        self.assertEqual(result.returncode, 0, result.stderr)
        expected = [f"[{rank}] eth7 secret.txt unset" for rank in (2, 3)]
        self.assertEqual(sorted(result.stdout.splitlines()), expected)

    def test_several_hosts_need_what_cannot_be_drawn(self):
        secret = os.environ | {"FERRY_SECRET": "hush-hush"}
        for addresses, port, env, words in (
            ("127.0.0.1,192.0.2.77", [], secret, "--hosts needs --port"),
            ("127.0.0.1,192.0.2.77", ["--port", "23456"], None, "--hosts needs FERRY_SECRET"),
            ("192.0.2.77", ["--port", "23456"], secret, "none of them is this machine"),
            ("127.0.0.1,127.0.0.2", ["--port", "23456"], secret, "are both this machine"),
        ):
            result = ferry_run(
                "--hosts", addresses, "-n", "2", *port, "--", "true",
                env=env or {k: v for k, v in os.environ.items() if k != "FERRY_SECRET"},
            )  # fmt: skip
            self.assertEqual(result.returncode, 1)
            self.assertIn(words, result.stderr)

    def test_a_taken_port_is_refused(self):
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            result = ferry_run("-n", "1", "--port", str(port), "--", "true")
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"port {port} is in use", result.stderr)

    def test_who_begins_a_second_group_at_a_port_hears_of_join(self):
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(min(server.getsockname()[1], 65534))
            job = ("--elastic", "1:2", "--only", "1", "--port", port)
            result = ferry_run(*job, "--", "true")
        self.assertEqual(result.returncode, 1)
        self.assertIn(
            "is in use on this machine; to join a group that runs there, add --join", result.stderr
        )
        self.assertNotIn("leave --port out", result.stderr)

    def test_stdin_goes_to_rank_0_only(self):
        result = ferry_run("-n", "3", "--", "cat", input="one\ntwo\n")
        self.assertEqual(result.stdout, "[0] one\n[0] two\n")


class Output(unittest.TestCase):
    def test_prefixes_on_both_streams(self):
        result = ferry_run("-n", "2", *shell("echo out; echo err >&2"))
        self.assertEqual(sorted(result.stdout.splitlines()), ["[0] out", "[1] out"])
        self.assertEqual(sorted(result.stderr.splitlines()), ["[0] err", "[1] err"])

    def test_no_prefix(self):
        result = ferry_run("-n", "2", "--no-prefix", *shell("echo out"))
        self.assertEqual(result.stdout, "out\nout\n")

    def test_prefixes_have_one_width(self):
        result = ferry_run("-n", "11", *shell("echo x"))
        self.assertIn("[ 3] x\n", result.stdout)
        self.assertIn("[10] x\n", result.stdout)

    def test_lines_are_never_torn(self):
        # Lines longer than a pipe's atomic write, in pieces, from several ranks at once.
        script = (
            "import os, sys\n"
            "r = os.environ['RANK']\n"
            "for i in range(300):\n"
            "    sys.stdout.write(r * 3000); sys.stdout.flush()\n"
            "    sys.stdout.write(r * 3000 + '\\n')\n"
        )
        result = ferry_run("-n", "4", "--", sys.executable, "-c", script)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.splitlines()
        self.assertEqual(len(lines), 1200)
        wanted = {f"[{r}] " + str(r) * 6000 for r in range(4)}
        self.assertEqual(set(lines), wanted)

    def test_the_last_line_needs_no_newline(self):
        self.assertEqual(ferry_run("-n", "1", "--", "printf", "end").stdout, "[0] end\n")

    def test_progress_bars_in_a_file(self):
        script = r"for i in 1 2 3 4 5; do printf '\r%s0%%' $i >&2; sleep 0.05; done; echo >&2"
        lines = ferry_run("-n", "1", *shell(script)).stderr.splitlines()
        self.assertEqual(lines[0], "[0] 10%")
        self.assertEqual(lines[-1], "[0] 50%")
        self.assertLess(len(lines), 5)

    def on_terminal(self, *arguments, env=None):
        pid, fd = pty.fork()
        if pid == 0:
            env = dict(os.environ, TERM="xterm", **env or {})
            os.execve(FERRY, [FERRY, "run", *arguments], env)
        text = b""
        while True:
            try:
                more = os.read(fd, 65536)
            except OSError:
                break
            if not more:
                break
            text += more
        os.close(fd)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)
        return text.decode()

    def test_terminal(self):
        script = r"printf '10%%\r20%%\r'; echo done; test -t 1 && echo terminal; true"
        text = self.on_terminal("-n", "1", *shell(script), env={"NO_COLOR": ""})
        self.assertIn("\r\x1b[K\x1b[36m[0]\x1b[0m 10%", text)
        self.assertIn("\r\x1b[K\x1b[36m[0]\x1b[0m done\r\n", text)
        self.assertNotIn("terminal", text)
        plain = self.on_terminal("-n", "1", *shell(script), env={"NO_COLOR": "1"})
        self.assertIn("[0] done", plain)
        self.assertNotIn("\x1b[36m", plain)

    def test_tty_rank(self):
        script = r"test -t 1 && echo terminal $RANK || echo pipe $RANK"
        text = self.on_terminal("-n", "2", "--tty-rank", "1", *shell(script), env={"NO_COLOR": "1"})
        self.assertEqual(sorted(text.split("\r\n")[:-1]), ["[0] pipe 0", "terminal 1"])

    def test_nobody_reads(self):
        job = start("-n", "2", *shell("while :; do echo $$; done"))
        pid = int(job.stdout.readline().split()[-1])
        job.stdout.close()
        self.assertEqual(job.wait(LIMIT), 141)
        job.stderr.close()
        self.assertFalse(runs(pid))

    def test_long_waits_for_a_rank_are_seen(self):
        """The second rank begins when the first has said, with its prefix, that it waits for it."""
        with tempfile.TemporaryDirectory() as folder:
            begin = Path(folder, "begin")
            rank = f'[ $RANK = 0 ] || until [ -e {begin} ]; do sleep 0.05; done; exec "{FERRY}" '
            env = dict(os.environ, FERRY_WAIT_NOTICE="0.2")
            job = start("-n", "2", *shell(rank + "doctor --net"), env=env)
            watchdog = threading.Timer(LIMIT, job.kill)
            watchdog.start()
            said = job.stderr.readline()
            begin.touch()
            job.communicate(timeout=LIMIT)
            watchdog.cancel()
        self.assertRegex(
            said,
            r"^\[0\] ferry: rank 0 has waited \S+ s for other ranks at 127\.0\.0\.1:\d+ \(.*\): "
            r"rank 1 never reached the store; \S+ s left \(FERRY_WAIT_NOTICE=0: no such lines\)$",
        )
        self.assertEqual(job.returncode, 0)


class Failure(unittest.TestCase):
    def test_exit_codes(self):
        for script, code in (
            ("exit 0", 0),
            ("exit 1", 1),
            ("[ $RANK = 1 ] && exit 42; true", 42),
            ("kill -9 $$", 137),
            ("[ $RANK = 2 ] && kill -TERM $$; true", 143),
        ):
            with self.subTest(script=script):
                self.assertEqual(ferry_run("-n", "3", *shell(script)).returncode, code)

    def test_the_first_failure_counts_and_is_named_once(self):
        script = "case $RANK in 2) exit 7;; *) sleep 0.3; exit 9;; esac"
        result = ferry_run("-n", "3", *shell(script))
        self.assertEqual(result.returncode, 7)
        self.assertEqual(len(result.stderr.splitlines()), 1)
        self.assertRegex(result.stderr, r"^ferry run: rank 2 \(pid \d+\) exited with code 7; .*5 s")

    def test_the_group_ends_after_the_grace(self):
        script = "[ $RANK = 1 ] && kill -9 $$; echo pid $$; sleep 60"
        begin = time.monotonic()
        result = ferry_run("-n", "3", "--grace", "0.7", *shell(script))
        took = time.monotonic() - begin
        self.assertEqual(result.returncode, 137)
        self.assertIn("was killed by signal 9 (SIGKILL)", result.stderr)
        self.assertIn("ending ranks 0, 2", result.stderr)
        self.assertGreater(took, 0.6)
        self.assertLess(took, 5)
        for line in result.stdout.splitlines():
            self.assertFalse(runs(int(line.split()[-1])))

    def test_the_grace_is_used(self):
        script = "[ $RANK = 1 ] && exit 3; sleep 0.5; echo survived"
        result = ferry_run("-n", "2", "--grace", "5", *shell(script))
        self.assertEqual(result.returncode, 3)
        self.assertEqual(result.stdout, "[0] survived\n")

    def test_sigterm_comes_before_sigkill(self):
        first = "[ $RANK = 1 ] && { sleep 0.4; exit 3; }; "
        script = first + "trap 'echo ended; exit 0' TERM; sleep 60 & wait"
        result = ferry_run("-n", "2", "--grace", "0.3", *shell(script))
        self.assertEqual(result.stdout, "[0] ended\n")

    def test_who_ignores_sigterm_is_killed(self):
        first = "[ $RANK = 1 ] && { sleep 0.4; exit 3; }; "
        script = first + "trap '' TERM; echo pid $$; sleep 60; sleep 60"
        begin = time.monotonic()
        result = ferry_run("-n", "2", "--grace", "0", *shell(script))
        self.assertEqual(result.returncode, 3)
        self.assertGreater(time.monotonic() - begin, 1.9)
        self.assertFalse(runs(int(result.stdout.split()[-1])))

    def test_a_stopped_rank_is_ended_too(self):
        script = "[ $RANK = 1 ] && { sleep 0.3; exit 3; }; kill -STOP $$; sleep 60"
        begin = time.monotonic()
        self.assertEqual(ferry_run("-n", "2", "--grace", "0", *shell(script)).returncode, 3)
        self.assertLess(time.monotonic() - begin, 5)

    def test_keep_going(self):
        script = "case $RANK in 0) exit 5;; 1) sleep 0.2; exit 6;; *) sleep 0.8; echo on;; esac"
        result = ferry_run("-n", "3", "--keep-going", "--grace", "0", *shell(script))
        self.assertEqual(result.returncode, 5)
        self.assertEqual(result.stdout, "[2] on\n")
        self.assertIn("rank 0", result.stderr)
        self.assertIn("rank 1", result.stderr)
        self.assertIn("--keep-going", result.stderr)


class Elastic(unittest.TestCase):
    """The ranks are scripts; tests/hosts and docs/elastic_joins.md have ranks that join a group."""

    def test_a_rank_that_fails_is_started_again(self):
        script = (
            "echo $RANK $FERRY_JOIN; if [ $RANK$FERRY_JOIN = 10 ]; then kill -9 $$; fi; sleep 0.6"
        )
        result = ferry_run("--elastic", "2:3", "--restarts", "1", *shell(script))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(
            sorted(result.stdout.splitlines()), ["[0] 0 0", "[1] 1 0", "[1] 1 1", "[2] 2 0"]
        )
        self.assertRegex(
            result.stderr,
            r"rank 1 \(pid \d+\) was killed .*; process \d+ takes its place \(restart 1 of 1\)",
        )

    def test_the_others_go_on_when_restarts_are_used_up(self):
        script = "if [ $RANK = 0 ]; then exit 7; fi; sleep 0.6; echo on"
        result = ferry_run("--elastic", "2:3", "--restarts", "2", *shell(script))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(sorted(result.stdout.splitlines()), ["[1] on", "[2] on"])
        self.assertEqual(result.stderr.count("takes its place"), 2)
        self.assertIn("all restarts are used up; the other 2 go on", result.stderr)

    def test_too_few_ranks_end_the_job(self):
        script = "case $RANK in 0) exit 7;; 1) sleep 0.3; exit 8;; *) sleep 60;; esac"
        begin = time.monotonic()
        result = ferry_run("--elastic", "2:3", "--grace", "0.1", *shell(script))
        self.assertLess(time.monotonic() - begin, 30)
        self.assertEqual(result.returncode, 8)
        self.assertIn("no restarts were allowed (--restarts); the other 2 go on", result.stderr)
        self.assertIn("1 of at least 2 ranks are left, which are ended after", result.stderr)

    def test_who_fails_at_the_end_is_not_started_again(self):
        script = "if [ $RANK = 0 ]; then sleep 0.4; exit 9; fi"
        result = ferry_run("--elastic", "1:2", "--restarts", "5", *shell(script))
        self.assertEqual(result.returncode, 0)
        self.assertNotIn("takes its place", result.stderr)
        self.assertIn("rank 0", result.stderr)

    def test_each_host_starts_its_own_ranks_again(self):
        # Of this machine only the second is an address. Both of its ranks fail; others run.
        # None ends well before both are there again: who fails at the end is not started again.
        hosts = ["--hosts", "192.0.2.77,127.0.0.1", "--port", "23456"]
        script = """echo $RANK $WORLD_SIZE $FERRY_JOIN $FERRY_PORT
            [ $FERRY_JOIN = 1 ] || exit 1
            touch $THERE/$RANK
            for i in $(seq 600); do [ -e $THERE/2 -a -e $THERE/3 ] && exit; sleep 0.05; done"""
        with tempfile.TemporaryDirectory() as there:
            result = ferry_run(
                "--elastic", "1:2", "--restarts", "2", *hosts, *shell(script),
                env=os.environ | {"FERRY_SECRET": "hush-hush", "THERE": there},
            )  # fmt: skip
        self.assertEqual(result.returncode, 0, result.stderr)
        expected = [f"[{rank}] {rank} 4 {joins} 23457" for rank in (2, 3) for joins in (0, 1)]
        self.assertEqual(sorted(result.stdout.splitlines()), expected)

    def test_some_ranks_begin_and_others_join(self):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "FERRY_BEGIN", "FERRY_JOIN", "FERRY_PORT")
        script = "echo " + " ".join(f"${name}" for name in names)
        job = ["--elastic", "1:4", "--port", "23456"]
        for arguments, expected in (
            (["--only", "2,1"], ["[1] 1 1 4 1 0 23457", "[2] 2 2 4 0 1 23457"]),
            (["--only", "3", "--join"], ["[3] 3 3 4 0 1 23457"]),
            (["--join"], [f"[{rank}] {rank} {rank} 4 0 1 23457" for rank in range(4)]),
            ([], [f"[{rank}] {rank} {rank} 4 0 0 23457" for rank in range(4)]),
        ):
            with self.subTest(arguments=arguments):
                result = ferry_run(*job, *arguments, *shell(script))
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual(sorted(result.stdout.splitlines()), expected)

    def test_a_job_that_a_joiner_starts_begins_as_any(self):
        env = os.environ | {"FERRY_JOIN": "1", "FERRY_BEGIN": "1"}
        result = ferry_run("-n", "2", *shell("echo $FERRY_BEGIN $FERRY_JOIN"), env=env)
        self.assertEqual(sorted(result.stdout.splitlines()), ["[0] 0 0", "[1] 0 0"])

    def test_who_joins_does_not_ask_for_the_port(self):
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(min(server.getsockname()[1], 65534))
            result = ferry_run("--elastic", "1:2", "--port", port, "--join", "--", "true")
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_a_signal_ends_it(self):
        with start("--elastic", "1:2", "--restarts", "9", *shell("echo up; sleep 60")) as process:
            for _ in range(2):
                process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(LIMIT), 128 + signal.SIGTERM)


class Signals(unittest.TestCase):
    def test_the_first_signal_is_passed_on_once(self):
        script = (
            "import os, signal, time\n"
            "got = []\n"
            "signal.signal(signal.SIGINT, lambda s, f: got.append(s))\n"
            "signal.signal(signal.SIGTERM, lambda s, f: got.append(s))\n"
            "print('pid', os.getpid(), flush=True)\n"
            "end = time.monotonic() + 1\n"
            "while time.monotonic() < end: time.sleep(0.05)\n"
            "print(*map(int, got), flush=True)\n"
        )
        for which in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=which):
                job = start("-n", "2", "--", sys.executable, "-c", script)
                read_pids(job, 2)
                job.send_signal(which)
                out, _ = job.communicate(timeout=LIMIT)
                self.assertEqual(job.returncode, 0)
                self.assertEqual(sorted(out.splitlines()), [f"[{r}] {int(which)}" for r in (0, 1)])

    def test_the_exit_code_tells_the_signal(self):
        job = start("-n", "2", *shell("echo pid $$; exec sleep 60"))
        pids = read_pids(job, 2)
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=LIMIT)
        self.assertEqual(job.returncode, 143)
        self.assertFalse(any(runs(pid) for pid in pids))

    def test_the_second_signal_kills(self):
        job = start("-n", "2", *shell("trap '' INT TERM; echo pid $$; sleep 60; sleep 60"))
        pids = read_pids(job, 2)
        job.send_signal(signal.SIGINT)
        time.sleep(0.3)
        self.assertIsNone(job.poll())
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=LIMIT)
        self.assertEqual(job.returncode, 137)
        self.assertFalse(any(runs(pid) for pid in pids))


class Limits(unittest.TestCase):
    # The preset's variable. Its check of objects' types needs descriptors of its own.
    @unittest.skipIf("UBSAN_OPTIONS" in os.environ, "a sanitizer lives under the same limit")
    def test_too_few_descriptors_for_so_many_ranks(self):
        result = subprocess.run(
            ["sh", "-c", f"ulimit -n 40; exec '{FERRY}' run -n 60 -- sleep 30"],
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(
            result.stderr,
            r"ferry run: rank \d+ of 60: .*Too many open files; this process may have 40 files "
            r"open \(ulimit -n\), and 60 ranks need about 152; raise it before: ulimit -n 152",
        )


class NothingStays(unittest.TestCase):
    HELPERS = "sleep 61 & echo pid $!; sleep 62 & echo pid $!; echo pid $$;"

    def test_what_a_rank_leaves_behind(self):
        job = start("-n", "2", *shell(self.HELPERS))
        pids = read_pids(job, 6)
        job.communicate(timeout=LIMIT)
        self.assertEqual(job.returncode, 0)
        self.assertFalse(any(runs(pid) for pid in pids))

    def test_launcher_killed(self):
        job = start("-n", "2", *shell(self.HELPERS + "wait"))
        pids = read_pids(job, 6)
        self.assertTrue(all(runs(pid) for pid in pids))
        job.kill()
        job.wait(LIMIT)
        self.assertTrue(wait_until(lambda: not any(runs(pid) for pid in pids)))
        job.stdout.close()
        job.stderr.close()

    def test_no_process_of_the_launcher_remains(self):
        mark = f"FERRY_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
        env = dict(os.environ, **dict([mark.split("=")]))
        for script in (self.HELPERS, "kill -9 $$", self.HELPERS + "exit 3"):
            ferry_run("-n", "2", "--grace", "0", *shell(script), env=env)
        left = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and runs(entry.name):
                try:
                    if mark.encode() in (entry / "environ").read_bytes():
                        left.append((entry / "cmdline").read_bytes())
                except OSError:
                    pass
        self.assertEqual(left, [])

    def test_no_descriptor_is_inherited(self):
        result = ferry_run("-n", "2", *shell("ls -1 /proc/self/fd | sort -n | tail -n 1"))
        highest = {int(re.sub(r"\[\d\] ", "", line)) for line in result.stdout.splitlines()}
        self.assertLessEqual(max(highest), 3)  # 3: the folder that ls reads


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        FERRY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
