//! What tells a file from an earlier or later one of the same name.

use object_store::ObjectMeta;

/// A file as a server has described it: its length, and its ETag or else its date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    pub(super) size: u64,
    e_tag: Option<Box<str>>,
    /// In seconds, as an answer's head has it; lists are more exact.
    modified: i64,
}

impl From<&ObjectMeta> for Version {
    fn from(meta: &ObjectMeta) -> Self {
        // Azure's lists have no quotes, its answers do.
        let quoted = |tag: &String| match tag.starts_with('"') || tag.starts_with("W/") {
            true => tag.as_str().into(),
            false => format!("\"{tag}\"").into(),
        };
        Self { size: meta.size, e_tag: meta.e_tag.as_ref().map(quoted), modified: meta.last_modified.timestamp() }
    }
}

impl Version {
    /// The ETag for `If-Match`. A weak one never matches, by HTTP's rules.
    pub(super) fn if_match(&self) -> Option<String> {
        self.e_tag.as_deref().filter(|tag| !tag.starts_with("W/")).map(str::to_owned)
    }

    /// Whether an answer is of this version. Not every server looks at `If-Match`.
    pub(super) fn is_of(&self, answer: &ObjectMeta) -> bool {
        let found = Self::from(answer);
        found.size == self.size
            && match &self.e_tag {
                Some(_) => found.e_tag == self.e_tag,
                None => found.modified == self.modified,
            }
    }

    /// What an entry of the cache is named by; `None` where the server says nothing by which a changed file is noticed.
    pub(super) fn name(&self) -> Option<String> {
        match &self.e_tag {
            Some(tag) => Some(format!("{tag}\0{}", self.size)),
            None => (self.modified != 0).then(|| format!("{}\0{}", self.modified, self.size)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn an_answer_is_compared_with_a_list() {
        let meta = |tag: Option<&str>, seconds: u64, size: u64| ObjectMeta {
            location: object_store::path::Path::default(),
            last_modified: (UNIX_EPOCH + Duration::from_secs(seconds)).into(),
            size,
            e_tag: tag.map(str::to_owned),
            version: None,
        };
        let listed = Version::from(&meta(Some("0x8D"), 5, 3));
        assert_eq!(listed.if_match().as_deref(), Some("\"0x8D\""));
        assert!(listed.is_of(&meta(Some("\"0x8D\""), 6, 3)));
        assert!(!listed.is_of(&meta(Some("\"0x8E\""), 5, 3)) && !listed.is_of(&meta(None, 5, 3)));
        assert!(!listed.is_of(&meta(Some("\"0x8D\""), 5, 4)));
        let dated = Version::from(&meta(None, 5, 3));
        assert!(dated.is_of(&meta(Some("\"a\""), 5, 3)) && !dated.is_of(&meta(None, 6, 3)));
        assert_eq!(Version::from(&meta(Some("W/\"a\""), 5, 3)).if_match(), None);
        assert_eq!(Version::from(&meta(None, 0, 3)).name(), None);
    }
}
