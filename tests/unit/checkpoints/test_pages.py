"""Memory that is used again: by whom, when not, and how much of it waits."""

import gc
from threading import Thread

import torch

from epimer.checkpoints.checkpoint import KEPT, LARGE, Pages, allocate


def tensor_on(pages, size):
    return torch.frombuffer(pages.take(size), dtype=torch.uint8, count=size)


def test_the_memory_of_a_tensor_that_is_gone_is_used_again():
    pages = Pages(1 << 20)
    first = tensor_on(pages, 5000)
    place = first.data_ptr()
    del first
    assert pages.kept == 5000
    again = tensor_on(pages, 4000)
    assert (again.data_ptr(), pages.kept) == (place, 0)
    assert tensor_on(pages, 4000).data_ptr() != place


def test_memory_is_not_used_again_while_a_part_of_the_tensor_lives():
    pages = Pages(1 << 20)
    whole = tensor_on(pages, 4096)
    whole.fill_(7)
    part = whole.view(64, 64)[3:5]
    del whole
    others = [tensor_on(pages, 4096).fill_(1) for _ in range(3)]
    assert pages.kept == 0
    assert (part == 7).all()
    assert len({other.data_ptr() for other in others}) == 3


def test_no_more_is_kept_than_allowed_and_what_waited_longest_goes_first():
    pages = Pages(10_000)
    small, wide = tensor_on(pages, 4000), tensor_on(pages, 9000)
    place = wide.data_ptr()
    del small
    del wide
    assert pages.kept == 9000
    assert tensor_on(pages, 9000).data_ptr() == place
    huge = tensor_on(pages, 20_000)
    del huge
    assert pages.kept == 0


def test_a_small_tensor_does_not_get_the_memory_of_a_much_larger_one():
    pages = Pages(1 << 20)
    wide = tensor_on(pages, 100_000)
    del wide
    small = tensor_on(pages, 1000)
    assert (pages.kept, len(small)) == (100_000, 1000)


def test_of_what_fits_the_smallest_is_used():
    pages = Pages(1 << 20)
    wide, narrow = tensor_on(pages, 8000), tensor_on(pages, 4000)
    places = wide.data_ptr(), narrow.data_ptr()
    del wide
    del narrow
    first = tensor_on(pages, 4000)
    assert (tensor_on(pages, 8000).data_ptr(), first.data_ptr()) == places


def test_what_waits_is_given_back_when_asked_and_what_is_in_use_is_not():
    pages = Pages(1 << 20)
    kept, gone = tensor_on(pages, 4096).fill_(7), tensor_on(pages, 5000)
    del gone
    assert pages.kept == 5000
    pages.release()
    assert pages.kept == 0
    assert (kept == 7).all()


def test_tensors_of_several_threads_never_share_memory():
    wrong = []

    def fill(value):
        for _ in range(200):
            W = allocate((LARGE,), torch.uint8).fill_(value)
            if (value != W).any():
                wrong.append(value)

    threads = [Thread(target=fill, args=(value,)) for value in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
    assert LARGE < KEPT
