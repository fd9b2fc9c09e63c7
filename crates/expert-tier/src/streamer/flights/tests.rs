use std::time::Duration;

use super::*;
use crate::mock::rng::SplitMix;

fn key(expert: u32) -> Key {
    Key::new(0, expert)
}

struct Book {
    flights: Flights,
    now: Instant,
}

impl Book {
    fn new() -> Self {
        Self {
            flights: Flights::default(),
            now: Instant::now(),
        }
    }

    fn in_seconds(&self, seconds: u64) -> Instant {
        self.now + Duration::from_secs(seconds)
    }

    fn join(&mut self, expert: u32, class: Class, ticket: Option<&Arc<Shared>>) {
        self.join_at(expert, class, Target::Pool, 10, ticket);
    }

    fn join_at(
        &mut self,
        expert: u32,
        class: Class,
        target: Target,
        seconds: u64,
        ticket: Option<&Arc<Shared>>,
    ) {
        let deadline = self.in_seconds(seconds);
        let waiter = ticket.map(|ticket| Waiter {
            ticket: ticket.clone(),
            index: 0,
            deadline,
        });
        let flights = &mut self.flights;
        flights.join(key(expert), class, target, deadline, waiter, self.now);
        self.check();
    }

    /// Each flight that waits is in its queue, under its turn, and nothing else is in any.
    fn check(&self) {
        let flights = &self.flights;
        let queued: usize = flights.queues.iter().map(BTreeMap::len).sum();
        assert_eq!(queued + flights.for_slabs.len(), flights.open.len());
        for (key, flight) in &flights.open {
            let queue = match flight.target {
                Target::Pool => &flights.queues[flight.class as usize],
                Target::Slab(_) => &flights.for_slabs,
            };
            assert_eq!(queue.get(&flight.turn), Some(key));
        }
    }

    /// Takes all of a class out, in their order.
    fn drain(&mut self, class: Class) -> Vec<u32> {
        let mut order = Vec::new();
        while let Some(key) = self.flights.front(class, |_| false) {
            assert_eq!(self.flights.front(class, |_| false), Some(key), "it stays");
            self.flights.remove(key).expect("an open flight");
            self.check();
            order.push(key.expert);
        }
        order
    }
}

#[test]
fn each_class_has_its_queue_in_the_order_of_arrival() {
    let mut book = Book::new();
    for (expert, class) in [
        (3, Class::Demand),
        (5, Class::Prefetch),
        (1, Class::Demand),
        (4, Class::Stream),
        (2, Class::Demand),
        (3, Class::Demand),
    ] {
        book.join(expert, class, None);
    }
    assert_eq!(book.drain(Class::Demand), [3, 1, 2]);
    assert_eq!(book.drain(Class::Stream), [4]);
    assert_eq!(book.drain(Class::Prefetch), [5]);
    assert_eq!(book.flights.len(), 0);
}

#[test]
fn guess_that_somebody_needs_goes_behind_the_demands_before_it() {
    let mut book = Book::new();
    let ticket = Shared::new(1);
    book.join(1, Class::Prefetch, None);
    book.join(2, Class::Demand, None);
    book.join(1, Class::Demand, Some(&ticket));
    book.join(3, Class::Demand, None);
    // A less urgent one changes nothing.
    book.join(2, Class::Prefetch, None);
    assert_eq!(book.drain(Class::Prefetch), [0; 0]);
    assert_eq!(book.drain(Class::Demand), [2, 1, 3]);
}

#[test]
fn flight_that_comes_back_keeps_its_turn() {
    let mut book = Book::new();
    for expert in 0..3 {
        book.join(expert, Class::Demand, None);
    }
    let flight = book.flights.remove(key(0)).unwrap();
    book.join(3, Class::Demand, None);
    book.flights.again(key(0), flight);
    book.check();
    assert_eq!(book.drain(Class::Demand), [0, 1, 2, 3]);
}

#[test]
fn flight_ends_with_the_last_who_waits_for_it() {
    let mut book = Book::new();
    let (one, two) = (Shared::new(1), Shared::new(1));
    book.join(0, Class::Demand, Some(&one));
    book.join(0, Class::Demand, Some(&two));
    book.join(1, Class::Demand, Some(&one));
    book.join(2, Class::Prefetch, None);
    let all = [key(0), key(1), key(2), key(9)];
    book.flights.give_up(&one, &all);
    book.check();
    assert!(book.flights.contains(key(0)) && !book.flights.contains(key(1)));
    assert!(book.flights.contains(key(2)), "a guess has nobody to lose");
    book.flights.give_up(&two, &all);
    book.check();
    assert!(!book.flights.contains(key(0)));
    assert_eq!(book.drain(Class::Demand), [0; 0]);
}

#[test]
fn asking_and_giving_up_leaves_nothing_behind() {
    let mut book = Book::new();
    book.join(0, Class::Demand, None);
    for i in 0..1000 {
        let ticket = Shared::new(1);
        book.join(1 + i % 3, Class::Demand, Some(&ticket));
        book.flights.give_up(&ticket, &[key(1 + i % 3)]);
    }
    book.check();
    assert_eq!(book.flights.len(), 1);
    assert_eq!(book.drain(Class::Demand), [0]);
}

#[test]
fn oldest_guesses_are_forgotten_and_those_somebody_waits_for_are_not() {
    let mut book = Book::new();
    let ticket = Shared::new(1);
    for expert in 0..10 {
        let waits = expert % 3 == 0;
        book.join(expert, Class::Prefetch, waits.then_some(&ticket));
    }
    book.flights.forget_guesses(10);
    assert_eq!(book.flights.len(), 10);
    book.flights.forget_guesses(7);
    book.check();
    assert_eq!(book.drain(Class::Prefetch), [0, 3, 5, 6, 7, 8, 9]);
    for expert in 0..4 {
        book.join(expert, Class::Prefetch, Some(&ticket));
    }
    book.flights.forget_guesses(2);
    book.check();
    assert_eq!(book.flights.len(), 4, "none of them is a mere guess");
}

#[test]
fn late_are_those_that_wait_and_are_out_of_time() {
    let mut book = Book::new();
    let place = Target::Slab(SlotId { slab: 1, slot: 0 });
    book.join_at(0, Class::Demand, Target::Pool, 1, None);
    book.join_at(1, Class::Prefetch, Target::Pool, 3, None);
    book.join_at(2, Class::Stream, place, 1, None);
    // Somebody has more time for it.
    book.join_at(3, Class::Demand, Target::Pool, 1, None);
    book.join_at(3, Class::Demand, Target::Pool, 5, None);
    assert!(book.flights.expired(book.now).is_empty());
    assert_eq!(book.flights.expired(book.in_seconds(2)), [key(0), key(2)]);
}

#[test]
fn those_for_slabs_are_in_order_and_in_no_queue_of_the_pool() {
    let mut book = Book::new();
    let place = |slot| SlotId { slab: 1, slot };
    for (expert, slot) in [(4, 0), (7, 1), (2, 0)] {
        let target = Target::Slab(place(slot));
        book.join_at(expert, Class::Stream, target, 10, None);
    }
    // More urgent now, and still for its place.
    book.join(2, Class::Demand, None);
    assert_eq!(book.flights.front(Class::Demand, |_| false), None);
    assert_eq!(
        book.flights.for_slabs(|_| false),
        [(key(4), place(0)), (key(7), place(1)), (key(2), place(0))]
    );
    book.flights.remove(key(4)).unwrap();
    book.check();
    assert_eq!(book.flights.for_slabs(|_| false).len(), 2);
}

#[test]
fn random_walk_keeps_each_flight_in_its_queue() {
    for seed in 0..20 {
        let mut random = SplitMix::new(seed);
        let mut book = Book::new();
        let mut tickets: Vec<Arc<Shared>> = Vec::new();
        let all: Vec<Key> = (0..12).map(key).collect();
        for _ in 0..400 {
            let expert = random.below(12) as u32;
            let class = Class::ALL[random.below(3) as usize];
            match random.below(6) {
                0 | 1 => {
                    let ticket = Shared::new(1);
                    book.join(expert, class, Some(&ticket));
                    tickets.push(ticket);
                }
                2 => {
                    let target = Target::Slab(SlotId {
                        slab: 1,
                        slot: expert,
                    });
                    book.join_at(expert, class, target, 10, None);
                }
                3 if !tickets.is_empty() => {
                    let ticket = tickets.swap_remove(random.below(tickets.len() as u64) as usize);
                    book.flights.give_up(&ticket, &all);
                }
                4 => {
                    if let Some(flight) = book.flights.remove(key(expert)) {
                        book.check();
                        if random.below(2) == 0 {
                            book.flights.again(key(expert), flight);
                        }
                    }
                }
                _ => book.flights.forget_guesses(3),
            }
            book.check();
        }
        for class in Class::ALL {
            book.drain(class);
        }
        assert_eq!(book.flights.len(), book.flights.for_slabs(|_| false).len());
    }
}
