"""The sums over those who wait, against sums taken one by one."""

from random import Random

from server.waiting_calls import Place, WaitingCalls, Work


def test_the_sums_are_those_of_all_calls_one_by_one() -> None:
    draw, calls, known = Random(1), WaitingCalls(), dict[Place, Work]()
    for number in range(6000):
        if known and draw.random() < (0.3 if number < 3000 else 0.6):
            place = draw.choice(list(known))
            calls.remove(place)
            del known[place]
        else:
            place, work = (float(draw.randrange(200)), number), Work(1, draw.randrange(900), draw.randrange(90))
            calls.add(place, work)
            known[place] = work
        if number % 50 == 0:
            key = float(draw.randrange(-1, 201))
            for sums, upto in ((calls.before(key), key), (calls.total, 1e9)):
                works = [work for place, work in known.items() if place[0] <= upto]
                assert sums == Work(*(sum(each) for each in zip(Work(), *works, strict=True)))
    assert max(len(run) for run in calls._runs) <= 256
    for place in known:
        calls.remove(place)
    assert (calls.total, calls.before(1e9), calls._runs) == (Work(), Work(), [[]])
