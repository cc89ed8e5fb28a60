//! What workers send to the training loop, which wakes once for several batches where these are made quickly.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::loader::lock;

/// For how long the receiver waits for several messages before it takes what there is.
const PATIENCE: Duration = Duration::from_millis(1);

/// Messages from any number of threads to one.
///
/// Waking a thread takes as long as making a small batch, and where there are fewer cores than threads it stops one that
/// makes batches. So a receiver that has to wait says for how many messages.
pub(super) struct Mailbox<T> {
    state: Mutex<State<T>>,
    enough: Condvar,
}

struct State<T> {
    messages: VecDeque<T>,
    /// How many messages the receiver waits for; 0 if it does not wait.
    awaited: usize,
    /// Whether the receiver is gone.
    closed: bool,
}

impl<T> Mailbox<T> {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(State { messages: VecDeque::new(), awaited: 0, closed: false }),
            enough: Condvar::new(),
        }
    }

    /// Sends a message; an urgent one wakes the receiver, however many it waits for.
    pub(super) fn send(&self, message: T, is_urgent: bool) {
        let mut state = lock(&self.state);
        if state.closed {
            return;
        }
        state.messages.push_back(message);
        if is_urgent || state.messages.len() >= state.awaited {
            self.wake(state);
        }
    }

    /// Wakes the receiver if it waits for more messages than there are: they do not come soon.
    pub(super) fn flush(&self) {
        let state = lock(&self.state);
        if !state.messages.is_empty() {
            self.wake(state);
        }
    }

    fn wake(&self, mut state: MutexGuard<'_, State<T>>) {
        if state.awaited > 0 {
            state.awaited = 0;
            drop(state);
            self.enough.notify_one();
        }
    }

    /// Drops the messages that nobody took, and those that are still sent.
    pub(super) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        let messages = std::mem::take(&mut state.messages);
        drop(state);
        drop(messages);
    }

    /// Moves all messages into `taken`, false if none came until `deadline`. Where there is none yet, waits for `several`
    /// of them, or for one if those do not come quickly.
    pub(super) fn receive(&self, taken: &mut VecDeque<T>, several: usize, deadline: Option<Instant>) -> bool {
        let mut state = lock(&self.state);
        if several > 1 {
            let soon = Instant::now() + PATIENCE;
            state = self.wait(state, several, Some(deadline.map_or(soon, |deadline| deadline.min(soon))));
        }
        state = self.wait(state, 1, deadline);
        taken.append(&mut state.messages);
        !taken.is_empty()
    }

    /// Waits for so many messages if there is none.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State<T>>,
        messages: usize,
        until: Option<Instant>,
    ) -> MutexGuard<'a, State<T>> {
        if !state.messages.is_empty() {
            return state;
        }
        state.awaited = messages;
        let waits = |state: &mut State<T>| state.awaited > 0;
        state = match until {
            None => self.enough.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let time = until.saturating_duration_since(Instant::now());
                self.enough.wait_timeout_while(state, time, waits).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        state.awaited = 0;
        state
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Long enough never to pass.
    const LONG: Duration = Duration::from_secs(120);

    #[test]
    fn messages_arrive_in_order_and_none_after_the_deadline() {
        let (mailbox, mut taken) = (Mailbox::new(), VecDeque::new());
        assert!(!mailbox.receive(&mut taken, 1, Some(Instant::now())));
        assert!(!mailbox.receive(&mut taken, 9, Some(Instant::now())));
        (0..3).for_each(|number| mailbox.send(number, false));
        // What is there is not waited for.
        assert!(mailbox.receive(&mut taken, 9, None));
        assert_eq!(taken, [0, 1, 2]);
    }

    #[test]
    fn a_receiver_is_woken_for_as_many_as_it_waits_for_or_an_urgent_one() {
        let woken = |awaited: usize, sent: usize, is_urgent: bool| {
            let mailbox = Mailbox::new();
            lock(&mailbox.state).awaited = awaited;
            (0..sent).for_each(|number| mailbox.send(number, is_urgent));
            lock(&mailbox.state).awaited == 0
        };
        assert!(!woken(3, 2, false) && woken(3, 3, false) && woken(3, 1, true) && woken(1, 1, false));
    }

    #[test]
    fn a_receiver_takes_what_there_is_when_no_more_comes_soon() {
        let mailbox = Mailbox::new();
        lock(&mailbox.state).awaited = 8;
        mailbox.flush();
        assert_eq!(lock(&mailbox.state).awaited, 8, "nothing is there");
        (0..3).for_each(|number| mailbox.send(number, false));
        mailbox.flush();
        assert_eq!(lock(&mailbox.state).awaited, 0);
    }

    #[test]
    fn a_closed_mailbox_keeps_nothing() {
        let (mailbox, message) = (Mailbox::new(), Arc::new(()));
        mailbox.send(message.clone(), false);
        mailbox.close();
        mailbox.send(message.clone(), true);
        assert_eq!(Arc::strong_count(&message), 1);
    }

    #[test]
    fn fewer_than_awaited_are_taken_after_a_while() {
        let mailbox = Mailbox::new();
        std::thread::scope(|scope| {
            scope.spawn(|| mailbox.send(7, false));
            let mut taken = VecDeque::new();
            assert!(mailbox.receive(&mut taken, 1000, Some(Instant::now() + LONG)));
            assert_eq!(taken, [7]);
        });
    }
}
