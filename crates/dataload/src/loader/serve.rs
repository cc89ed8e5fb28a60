//! What a thread of an epoch does: makes batches by permit, and reads ahead meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crossbeam::channel::{Receiver, TryRecvError};

use crate::loader::budget::Budget;
use crate::loader::guard::survived;
use crate::loader::mailbox::Mailbox;
use crate::loader::turns::AtWork;
use crate::loader::work::{EpochWork, Made};
use crate::{Cancellation, DataError};

/// Messages to workers.
pub(super) enum Permit {
    Make,
    /// There may be room to read ahead.
    ReadAhead,
    /// The worker that receives this ends.
    End,
}

/// Messages from workers.
pub(super) enum Message<B> {
    Made(Made<B>),
    /// A worker has ended; `done` when no batch was left to make.
    Ended {
        done: bool,
        error: Option<DataError>,
    },
}

/// What the threads of an epoch share with each other and with the training loop.
pub(super) struct Common<B> {
    pub(super) work: Arc<dyn EpochWork<B>>,
    pub(super) granted: Receiver<Permit>,
    pub(super) mailbox: Mailbox<Message<B>>,
    /// How many finished batches are in messages.
    pub(super) unreceived: AtomicUsize,
    pub(super) budget: Option<Budget<B>>,
    pub(super) at_work: AtWork,
    pub(super) cancelled: Cancellation,
}

impl<B> Common<B> {
    /// Makes batches until none are left (`true`), or until the thread is told to stop (`false`).
    pub(super) fn serve(&self) -> Result<bool, DataError> {
        while !self.cancelled.is_cancelled() {
            let permit = match self.granted.try_recv() {
                Err(TryRecvError::Empty) if self.read_ahead()? => continue,
                Err(TryRecvError::Empty) => self.granted.recv().ok(),
                permit => permit.ok(),
            };
            match permit {
                None => return Ok(true),
                Some(Permit::End) => return Ok(false),
                // At once: the next permit may be for a thread that sleeps.
                Some(Permit::ReadAhead) => _ = self.read_ahead()?,
                Some(Permit::Make) if !self.make()? => return Ok(!self.cancelled.is_cancelled()),
                Some(Permit::Make) => {}
            }
        }
        Ok(false)
    }

    /// Makes a batch and sends it, once there is room for it; false where none is left, or when cancelled.
    fn make(&self) -> Result<bool, DataError> {
        let making = match &self.budget {
            None => None,
            Some(budget) => match budget.begin(&self.cancelled, || self.meanwhile())? {
                None => return Ok(false),
                making => making,
            },
        };
        let (_making, begun) = (self.at_work.begin(), Instant::now());
        let Some(mut made) = make_guarded(&*self.work, &self.cancelled)? else {
            self.at_work.no_batch_is_left();
            return Ok(false);
        };
        if let Some(making) = making {
            making.done(&mut made);
        }
        self.at_work.took(begun.elapsed());
        self.unreceived.fetch_add(1, Ordering::Relaxed);
        self.mailbox.send(Message::Made(made), false);
        Ok(true)
    }

    /// While there is no room for another batch, the training loop does not wait for several, and the thread reads
    /// ahead.
    fn meanwhile(&self) -> Result<bool, DataError> {
        self.mailbox.flush();
        self.read_ahead()
    }

    fn read_ahead(&self) -> Result<bool, DataError> {
        survived(|| self.work.read_ahead(&self.cancelled)).map_err(died)
    }
}

/// Makes a batch, and turns a panic into an error: some of the user's code, such as `Dataset::key`, runs outside of
/// [`guarded`](super::guard::guarded).
pub(crate) fn make_guarded<B>(work: &dyn EpochWork<B>, cancelled: &Cancellation) -> Result<Option<Made<B>>, DataError> {
    survived(|| work.make(cancelled)).map_err(died)
}

fn died(message: String) -> DataError {
    DataError::WorkerDied { message }
}
