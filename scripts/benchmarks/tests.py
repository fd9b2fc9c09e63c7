"""What can be wrong without anybody noticing: the draw, the ratios, the charts. `make scripts-check` runs these."""

import os
import unittest
from pathlib import Path
import xml.etree.ElementTree as xml

from . import contenders, files, plot, process, store, table, work


class Draw(unittest.TestCase):
    def test_numbers_are_those_of_the_other_programs(self):
        # SplitMix64's first, as in the Rust tests.
        self.assertEqual(work.draw(1_234_567, 2, 110), [6457827717110365317 % 110, 3203168211198807973 % 110])

    def test_percentiles_take_the_nearest_rank(self):
        self.assertEqual(work.percentile([1, 2, 3, 4], 50), 2)
        self.assertEqual(work.percentile(list(range(1, 101)), 99), 99)
        self.assertEqual(work.percentile([], 50), 0)


class Ratios(unittest.TestCase):
    def test_goals_name_contenders_that_there_are(self):
        class Nothing(files.Files, files.Disk):
            def __init__(self):
                self.can_skip_sync = True
                self.files, self.checkpoint, self.work = [], None, None

        known = {*contenders.bulk(None, 8), *contenders.single(None, 8),
                 *files.Files.steps(Nothing()), *files.Disk.steps(Nothing())}
        for _, above, below, *_ in table.GOALS:
            self.assertIn(above, known)
            self.assertIn(below, known)

    def test_ratio_is_of_medians_and_met_in_its_sense(self):
        samples = {"ours, pack": [{"gb_per_s": v} for v in (1, 8, 2)], "cp and fsync": [{"gb_per_s": v} for v in (2, 1, 2)],
                   "ours, checksums off, one record": [{"p50_us": 120}], "bare pair, sendfile, one record": [{"p50_us": 100}]}
        made = {one["ratio"]: one for one in table.ratios(samples)}
        pack = made["pack / cp and fsync"]
        self.assertEqual((pack["here"], pack["least"], pack["most"], pack["met"]), (1, 0.5, 8, True))
        latency = made["latency of one record, ours off / bare pair"]
        self.assertEqual((latency["here"], latency["met"]), (1.2, False))
        self.assertEqual(len(made), 2)

    def test_who_fails_is_left_out_and_the_others_go_on(self):
        calls, samples, failed = [], {}, {}

        def fails():
            calls.append(1)
            raise process.Failed("no such thing")

        table.take_turns({"a": fails, "b": lambda: {"gb_per_s": 1.0}}, 3, samples, failed, lambda _: None)
        self.assertEqual((len(calls), failed, len(samples["b"])), (1, {"a": "no such thing"}, 3))
        self.assertNotIn("a", samples)


class Charts(unittest.TestCase):
    def test_bars_and_curves_are_xml_with_a_mark_for_each_value(self):
        svg = plot.bars("a < b", "GB/s", [("ours & more", (2.0, 1.0, 3.0)), ("floor: x", (9.0, 8.0, 9.5))])
        xml.fromstring(svg)
        self.assertEqual(svg.count("<rect"), 3)
        svg = plot.curves("t", "x", "y", {"one": [(1, 1, 1, 2), (10, 5, 4, 6)], "two": [(10, 2, 2, 2)]})
        xml.fromstring(svg)
        self.assertEqual(svg.count("<circle"), 3)
        xml.fromstring(plot.bars("nothing", "GB/s", []))
        for highest in (0.001, 1, 3, 125, 999, 32_000):
            self.assertLessEqual(highest / plot.step(highest), 8)


class Sizes(unittest.TestCase):
    def test_experts_of_a_power_of_two_are_exact(self):
        for size in (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26):
            hidden, inter = store.square(size)
            self.assertEqual(4 * hidden * inter, size)


class Processes(unittest.TestCase):
    def test_reasons_are_one_line(self):
        for command, part in ((["sh", "-c", "echo one >&2; echo two >&2; exit 3"], "sh ended with 3: two"),
                              (["./no-such-program"], "cannot be run"), (["sleep", "9"], "did not end within")):
            with self.assertRaises(process.Failed) as caught:
                process.run(*command, limit_s=0.2 if command[0] == "sleep" else 10)
            self.assertIn(part, str(caught.exception))

    def test_server_is_found_ready_and_stands_still_until_it_is_asked(self):
        script = "echo noise; echo '{\"a\": 1}'; cat"
        server = process.Server("sh", "-c", script)
        try:
            self.assertEqual(server.ready, {"a": 1})
            state = lambda: Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            os.waitid(os.P_PID, server.process.pid, os.WSTOPPED | os.WNOWAIT)
            self.assertEqual(state(), "T")
            with server:
                os.waitid(os.P_PID, server.process.pid, os.WCONTINUED | os.WNOWAIT)
                self.assertNotEqual(state(), "T")
        finally:
            server.end()
        with self.assertRaises(process.Failed) as caught:
            process.Server("sh", "-c", "echo why >&2; exit 4")
        self.assertEqual(str(caught.exception), "sh ended at once, with 4: why")


if __name__ == "__main__":
    unittest.main()
