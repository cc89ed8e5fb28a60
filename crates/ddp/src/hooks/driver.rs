//! Runs a hook for the reducer, and keeps each bucket's state between `start` and `finish`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use overdrive_ffi::c10d::{BucketHook, GradBucket};
use tch::Tensor;

use super::{CommHook, lock};
use crate::check;
use crate::error::DdpError;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

pub(super) struct Driver<H: CommHook> {
    hook: Arc<Mutex<H>>,
    in_flight: HashMap<usize, (GradBucket, H::InFlight)>,
}

impl<H: CommHook> Driver<H> {
    pub(super) fn new(hook: Arc<Mutex<H>>) -> Self {
        Self { hook, in_flight: HashMap::new() }
    }
}

impl<H: CommHook> BucketHook for Driver<H> {
    fn start(&mut self, bucket: GradBucket) -> Result<(), BoxError> {
        let _no_grad = tch::no_grad_guard();
        let in_flight = lock(&self.hook).start(&bucket)?;
        self.in_flight.insert(bucket.index, (bucket, in_flight));
        Ok(())
    }

    fn finish(&mut self, index: usize) -> Result<Tensor, BoxError> {
        let (bucket, in_flight) = self
            .in_flight
            .remove(&index)
            .ok_or_else(|| format!("bucket {index} was finished before it was started"))?;
        let _no_grad = tch::no_grad_guard();
        let mut hook = lock(&self.hook);
        let mean = hook.finish(&bucket, in_flight)?;
        let like = &bucket.buffer;
        let fits = mean.defined()
            && check::other_layout(&mean).is_none()
            && mean.numel() == like.numel()
            && mean.kind() == hook.kind_of_mean().unwrap_or(like.kind())
            && mean.device() == like.device()
            && mean.is_contiguous();
        if fits {
            return Ok(mean);
        }
        Err(Box::new(DdpError::InvalidTensor {
            op: "communication hook",
            argument: format!("the mean of bucket {index}"),
            found: check::describe(&mean),
            expected: format!("contiguous, and like the bucket's buffer, {}", check::describe(like)),
        }))
    }
}
