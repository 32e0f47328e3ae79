"""Two threads that serve and one that writes, for some seconds: `python write_race.py PACE SECONDS SERVING`.

PACE is what the writer waits between two writes, 0 for not at all. SERVING is "loop" for threads that serve without a pause, and "queue"
for threads that take requests off a queue. A weight counts its writes in all its elements, and a product with a one-hot row gives the
count back, exactly: a product may not give a count from before the product began. Prints how many products and rounds there were, and how
many casts were saved.
"""

from __future__ import annotations

import queue
import sys
import threading
import time

import torch
import torch.nn.functional as F

import hmp

SIZE = 256  # large enough that a write meets a cast that is under way
MOST = 1500  # every whole number up to 2,048 is one of float16's
ONE_HOT = torch.zeros(1, SIZE)
ONE_HOT[0, 0] = 1.0


class Round:
    """A weight's life: it is served and written at the same time, and served once more when nobody writes any more."""

    def __init__(self, pace: float, seconds: float) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(SIZE, SIZE))
        self.begun = self.done = self.products = 0
        self.address = self.weight.data_ptr()
        self.ended = threading.Event()
        self.pace, self.until = pace, time.monotonic() + seconds

    def write(self) -> None:
        while self.done < MOST and time.monotonic() < self.until:
            self.begun += 1
            with torch.no_grad():
                (self.weight.data if self.begun % 3 == 0 else self.weight).fill_(self.begun)
            self.done = self.begun
            if self.pace:
                self.ended.wait(self.pace)  # as a thread waits: nobody sets it
        self.ended.set()

    def serve(self) -> None:
        written = self.done
        with torch.no_grad():
            counts = F.linear(ONE_HOT, self.weight)
        self.products += 1
        least, most = counts.min().item(), counts.max().item()
        if not written <= least <= most <= self.begun:
            raise AssertionError(f"a product gives {least:g} to {most:g} where {written} writes were done and {self.begun} begun")

    def loop(self) -> None:
        while not self.ended.is_set():
            self.serve()

    def requests(self) -> None:
        requests: queue.Queue[int | None] = queue.Queue()

        def feed() -> None:
            while not self.ended.wait(0.0005):
                requests.put(1)
            requests.put(None)

        feeder = threading.Thread(target=feed)
        feeder.start()
        while requests.get() is not None:
            for _ in range(3):
                self.serve()
        feeder.join()


def run(pace: float, seconds: float, serving: str) -> str:
    failed: list[BaseException] = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            failed.append(error)
            raise

    products = rounds = moved = 0
    end = time.monotonic() + seconds
    with hmp.convert(policy=hmp.Policy("half", bf16={"linear"}, dtype=torch.float16)):
        while time.monotonic() < end and not failed:
            this = Round(pace, min(2.0, seconds))
            serve = this.loop if serving == "loop" else this.requests
            threads = [threading.Thread(target=guarded, args=(each,)) for each in (serve, serve, this.write)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for _ in range(3):
                this.serve()
            products, rounds = products + this.products, rounds + 1
            moved += this.weight.data_ptr() != this.address
        info = hmp.cache_info()
    assert not failed, failed
    assert not moved, f"{moved} weights have moved: a write met a mark half set"
    return f"{rounds} rounds, {products} products, {info.hits} casts saved, refused {info.refused}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(run(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]))
