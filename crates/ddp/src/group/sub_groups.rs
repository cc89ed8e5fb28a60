//! Groups of some of a group's ranks.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

use super::{Backend, ProcessGroup};
use crate::error::DdpError;

impl ProcessGroup {
    /// A group of some of this group's ranks, in rising order; `None` on ranks that are not members. Every rank of this
    /// group calls it.
    ///
    /// # Errors
    /// When a rank does not exist or is given twice, `ranks` is empty, or a member does not call it within the timeout.
    ///
    /// # Syncs
    /// Waits for the members.
    ///
    /// # Source
    /// `torch.distributed.new_group`
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Self>, DdpError> {
        self.sub_group("new_group", &self.members(ranks)?, None)
    }

    /// As many groups at once as there are parts, each of some of this group's ranks, in rising order; this rank's part, or
    /// `None` where it is in none. Over NCCL their communicators are split from this group's, which needs no meeting; over
    /// Gloo they are made anew. Every rank of this group calls it with the same parts.
    ///
    /// # Errors
    /// When a rank does not exist or is given twice, a part is empty, or this group has ended; over Gloo, when a member of
    /// this rank's part does not call it within the timeout.
    ///
    /// # Syncs
    /// Over NCCL waits for all ranks of this group, without a limit; over Gloo for the members of its part.
    ///
    /// # Source
    /// `torch.distributed.split_group`; `ncclCommSplit`
    pub fn split_group(&self, parts: &[&[usize]]) -> Result<Option<Self>, DdpError> {
        // Of all parts together, each rank once.
        self.members(&parts.concat())?;
        let parts = parts.iter().map(|part| self.members(part)).collect::<Result<Vec<_>, _>>()?;
        let mut own = None;
        for (color, part) in (0..).zip(&parts) {
            // NCCL's ranks take part in one split, whatever their parts.
            let split = (self.0.backend == Backend::Nccl).then_some(color);
            own = self.sub_group("split_group", part, split)?.or(own);
        }
        if let (Backend::Nccl, None, Some(device)) = (self.0.backend, &own, self.0.settings.cuda_device) {
            let split = self.0.engine.split_none(device);
            split.map_err(|source| DdpError::between(self.context("split_group"), source))?;
        }
        Ok(own)
    }

    /// The ranks in rising order, if they can be a group.
    fn members(&self, ranks: &[usize]) -> Result<Vec<usize>, DdpError> {
        let wrong = |reason: String| DdpError::InvalidMembers { ranks: ranks.to_vec(), reason };
        let mut members = ranks.to_vec();
        members.sort_unstable();
        members.dedup();
        if members.len() != ranks.len() {
            return Err(wrong("a rank is given twice".to_owned()));
        }
        match members.last() {
            None => Err(wrong("there are none".to_owned())),
            Some(&last) if last >= self.size() => {
                Err(wrong(format!("rank {last} is outside the group of {}", self.size())))
            }
            Some(_) => Ok(members),
        }
    }

    fn sub_group(&self, op: &'static str, members: &[usize], color: Option<u32>) -> Result<Option<Self>, DdpError> {
        // PyTorch names the first group "0" and counts upwards.
        let name = (self.0.sub_groups.fetch_add(1, Ordering::Relaxed) + 1).to_string();
        let Ok(rank) = members.binary_search(&self.rank()) else { return Ok(None) };
        let global_ranks = members.iter().map(|&member| self.0.global_ranks[member]).collect();
        let inner = &*self.0;
        let (store, backend, local_rank) = (&inner.store, inner.backend, inner.local_rank);
        let split = color.map(|color| (&inner.engine, color));
        let group = Self::join(store, backend, &name, rank, global_ranks, local_rank, inner.settings, split)
            .map_err(|source| DdpError::between(self.context(op), source))?;
        let mut members_of = inner.members_of.lock().unwrap_or_else(PoisonError::into_inner);
        members_of.retain(|sub_group| sub_group.strong_count() > 0);
        members_of.push(Arc::downgrade(&group.0));
        Ok(Some(group))
    }

    /// The sub-groups, the newest first, each behind its own ones, and then this group.
    pub(crate) fn with_sub_groups(&self) -> Vec<Self> {
        let members_of = self.0.members_of.lock().unwrap_or_else(PoisonError::into_inner);
        let mut groups: Vec<Self> =
            members_of.iter().rev().filter_map(Weak::upgrade).flat_map(|inner| Self(inner).with_sub_groups()).collect();
        groups.extend(self.0.host.lock().unwrap_or_else(PoisonError::into_inner).clone());
        groups.push(self.clone());
        groups
    }
}
