"""`make bench`: ratios against peers, all in one run on one machine, into build/bench.json."""
