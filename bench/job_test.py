"""What job.py tells those who wait: python3 job_test.py"""

import io
import sys
import time
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import job


class Terminal(io.StringIO):
    def isatty(self):
        return True


def said_by(stream, told):
    """What `told` has a Progress say that repeats itself each 20 ms."""
    with mock.patch.object(sys, "stderr", stream), mock.patch.object(job.Progress, "EVERY", 0.02):
        progress = job.Progress()
        told(progress)
        progress.say("")
        return stream.getvalue()


def wait_for(stream, words, times):
    deadline = time.monotonic() + 30
    while stream.getvalue().count(words) < times:
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.01)


class Say(unittest.TestCase):
    def test_a_pipe_gets_lines_while_nothing_new_is_said(self):
        pipe = io.StringIO()

        def told(progress):
            progress.say("rounds: 0 of 2")
            wait_for(pipe, "rounds: 0 of 2", 3)

        lines = said_by(pipe, told).splitlines()
        self.assertTrue(all(line.startswith("rounds: 0 of 2") for line in lines), lines)

    def test_nothing_is_said_after_the_end(self):
        pipe = io.StringIO()

        def told(progress):
            progress.say("rounds: 0 of 2")
            progress.say("")
            before = pipe.getvalue()
            time.sleep(0.2)  # ten times as long as until the next line
            self.assertEqual(pipe.getvalue(), before)

        said_by(pipe, told)

    def test_a_terminal_shows_the_last_words_in_place(self):
        terminal = Terminal()

        def told(progress):
            progress.say("rounds: 0 of 2")
            wait_for(terminal, "\r\x1b[Krounds: 0 of 2", 3)
            progress.say("rounds: 1 of 2")

        shown = said_by(terminal, told)
        self.assertNotIn("\n", shown)
        self.assertTrue(shown.startswith("\r\x1b[Krounds: 0 of 2\r\x1b[K"), shown)
        self.assertIn("\r\x1b[Krounds: 1 of 2", shown)
        self.assertTrue(shown.endswith("\r\x1b[K"), shown)


class Bootstrap(unittest.TestCase):
    def test_a_program_that_no_launcher_has_started_names_the_command(self):
        class Ferry:
            InvalidArgumentError = ValueError

            @staticmethod
            def from_environment():
                raise ValueError("environment variable WORLD_SIZE is not set")

        words = ["bench/elastic_cost.py", "--decode"]
        with (
            mock.patch.dict(sys.modules, ferry=Ferry),
            mock.patch.object(sys, "argv", words),
            self.assertRaises(SystemExit) as end,
        ):
            job.bootstrap(ranks=2)
        self.assertIn("WORLD_SIZE is not set", str(end.exception))
        self.assertIn("ferry run -n 2 -- python bench/elastic_cost.py --decode", str(end.exception))


if __name__ == "__main__":
    unittest.main()
