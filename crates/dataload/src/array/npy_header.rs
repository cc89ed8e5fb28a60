//! The header of an npy file: a Python dictionary of three entries, read without a Python parser.

/// The header's entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) descr: String,
    pub(super) fortran_order: bool,
    pub(super) shape: Vec<usize>,
}

/// As many as numpy supports.
const MAX_DIMENSIONS: usize = 64;

/// Reads `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`, in any order of entries; an error describes
/// what was found instead.
pub(super) fn parse(text: &str) -> Result<Header, String> {
    let mut cursor = Cursor { rest: text };
    let (mut descr, mut fortran_order, mut shape) = (None, None, None);
    cursor.expect("{")?;
    while !cursor.take("}") {
        let key = cursor.string()?;
        cursor.expect(":")?;
        match key {
            "descr" => descr = Some(cursor.string()?.to_owned()),
            "fortran_order" => fortran_order = Some(cursor.boolean()?),
            "shape" => shape = Some(cursor.tuple()?),
            other => return Err(format!("the entry {other:?}")),
        }
        if !cursor.take(",") {
            cursor.expect("}")?;
            break;
        }
    }
    cursor.skip_space();
    if !cursor.rest.is_empty() {
        return Err(format!("{:?} after the header's end", short(cursor.rest)));
    }
    match (descr, fortran_order, shape) {
        (Some(descr), Some(fortran_order), Some(shape)) => Ok(Header { descr, fortran_order, shape }),
        (None, ..) => Err("no descr".to_owned()),
        (_, None, _) => Err("no fortran_order".to_owned()),
        (.., None) => Err("no shape".to_owned()),
    }
}

struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_ascii_start();
    }

    fn take(&mut self, token: &str) -> bool {
        self.skip_space();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        if self.take(token) { Ok(()) } else { Err(format!("{:?} in place of {token}", short(self.rest))) }
    }

    fn string(&mut self) -> Result<&'a str, String> {
        self.skip_space();
        let found = || format!("{:?} in place of a quoted string", short(self.rest));
        let quote = self.rest.chars().next().filter(|quote| ['\'', '"'].contains(quote)).ok_or_else(found)?;
        let (text, rest) = self.rest[1..].split_once(quote).ok_or_else(found)?;
        self.rest = rest;
        Ok(text)
    }

    fn boolean(&mut self) -> Result<bool, String> {
        if self.take("True") {
            return Ok(true);
        }
        self.expect("False").map(|()| false)
    }

    fn tuple(&mut self) -> Result<Vec<usize>, String> {
        let mut sizes = Vec::new();
        self.expect("(")?;
        while !self.take(")") {
            if sizes.len() == MAX_DIMENSIONS {
                return Err(format!("more than {MAX_DIMENSIONS} dimensions"));
            }
            sizes.push(self.integer()?);
            if !self.take(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(sizes)
    }

    fn integer(&mut self) -> Result<usize, String> {
        self.skip_space();
        let end = self.rest.find(|character: char| !character.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        let value = digits.parse().map_err(|_| format!("{:?} in place of a size", short(self.rest)))?;
        // Python 2 wrote long integers with an `L`.
        self.rest = rest.strip_prefix('L').unwrap_or(rest);
        Ok(value)
    }
}

fn short(text: &str) -> String {
    text.chars().take(20).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_is_read() {
        let header = |shape: &[usize]| Header { descr: "<f4".into(), fortran_order: false, shape: shape.to_vec() };
        for (text, shape) in [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }          \n", &[2, 3][..]),
            ("{\"shape\":(3,),\"descr\":\"<f4\",\"fortran_order\":False}", &[3]),
            (" { 'descr' : '<f4' , 'fortran_order' : False , 'shape' : ( ) } ", &[]),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (7L, 2L)}", &[7, 2]),
        ] {
            assert_eq!(parse(text).unwrap(), header(shape), "{text}");
        }
    }

    #[test]
    fn errors_say_what_is_wrong() {
        for (text, part) in [
            ("", "in place of {"),
            ("{}", "no descr"),
            ("{'descr': '<f4', 'shape': (1,)}", "no fortran_order"),
            ("{'descr': '<f4', 'fortran_order': False}", "no shape"),
            ("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': ()}", "in place of a quoted string"),
            ("{'descr': '<f4', 'fortran_order': Maybe, 'shape': ()}", "in place of False"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", "in place of a size"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999,)}", "in place of a size"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2}", "in place of )"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (1)} more", "after the header's end"),
            ("{'descr': 'é", "in place of a quoted string"),
            ("{'other': 1}", "other"),
        ] {
            assert!(parse(text).unwrap_err().contains(part), "{text}: {}", parse(text).unwrap_err());
        }
        let deep = format!("{{'shape': ({})}}", "1,".repeat(100_000));
        assert!(parse(&deep).unwrap_err().contains("more than 64"));
    }
}
