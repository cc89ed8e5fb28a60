//! Reads Rust and C++ just well enough for `tidy`: code without its comments and literals, and C++ declarations.

#[derive(Clone, Copy, PartialEq)]
pub enum Language {
    Rust,
    Cpp,
}

/// The text with comments and literals replaced by spaces; the line numbers stay the same.
pub fn code_only(text: &str, language: Language) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let word_before = code.chars().next_back().is_some_and(is_word);
        let skipped = match skipped(rest, language, word_before) {
            0 => {
                code.push(first);
                rest = &rest[first.len_utf8()..];
                continue;
            }
            length => &rest[..length],
        };
        code.extend(skipped.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = &rest[skipped.len()..];
    }
    code
}

/// The length in bytes of the comment or literal at the start of `text`; 0 if there is none.
fn skipped(text: &str, language: Language, word_before: bool) -> usize {
    let until = |from: usize, end: &str| text[from..].find(end).map_or(text.len(), |at| from + at + end.len());
    if text.starts_with("//") {
        return text.find('\n').unwrap_or(text.len());
    }
    if text.starts_with("/*") {
        return if language == Language::Rust { nested_comment(text) } else { until(2, "*/") };
    }
    if !word_before && let Some((open, close)) = raw_string(text, language) {
        return until(open, &close);
    }
    match text.as_bytes()[0] {
        b'"' => quoted(text, '"'),
        // A lifetime or a digit separator is not a literal: 'a, 1'000.
        b'\'' if text[1..].starts_with('\\') || text[1..].chars().nth(1) == Some('\'') => quoted(text, '\''),
        _ => 0,
    }
}

fn nested_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text[at..];
        let (step, change) = if rest.starts_with("/*") {
            (2, 1)
        } else if rest.starts_with("*/") {
            (2, -1)
        } else {
            (rest.chars().next().map_or(1, char::len_utf8), 0)
        };
        at += step;
        depth += change;
        if depth == 0 {
            break;
        }
    }
    at
}

/// The offset of a raw string's text, and its closing delimiter: `r#"..."#` in Rust, `R"tag(...)tag"` in C++.
fn raw_string(text: &str, language: Language) -> Option<(usize, String)> {
    match language {
        Language::Rust => {
            let hashes = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
            let count = hashes.len() - hashes.trim_start_matches('#').len();
            let open = text.len() - hashes.len() + count + 1;
            hashes[count..].starts_with('"').then(|| (open, format!("\"{}", "#".repeat(count))))
        }
        Language::Cpp => {
            let tag = text.strip_prefix("R\"")?.split('(').next()?;
            Some((2 + tag.len() + 1, format!("){tag}\"")))
        }
    }
}

fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The lines (from 1) that contain `word` as a whole word.
pub fn lines_with_word(code: &str, word: &str) -> Vec<usize> {
    let holds = |line: &str| line.split(|c| !is_word(c)).any(|it| it == word);
    code.lines().enumerate().filter(|(_, line)| holds(line)).map(|(index, _)| index + 1).collect()
}

/// The functions that C++ text declares `extern "C"`, one by one or in a block: (line, declaration).
pub fn extern_c_functions(text: &str) -> Vec<(usize, String)> {
    // `code_only` would blank the literal of `extern "C"`, so it is replaced by a marker first.
    let marked = text.replace("extern \"C\"", "extern_C   ");
    let code = without_preprocessor(&code_only(&marked, Language::Cpp));
    let mut functions = Vec::new();
    for (start, _) in code.match_indices("extern_C") {
        let from = start + "extern_C".len();
        let body = code[from..].trim_start();
        let offset = code.len() - body.len();
        if let Some(block) = body.strip_prefix('{') {
            declarations(&code, offset + 1, block, &mut functions);
        } else {
            let end = body.find(['{', ';']).unwrap_or(body.len());
            push(&code, offset, &body[..end], &mut functions);
        }
    }
    functions
}

fn without_preprocessor(code: &str) -> String {
    let mut continued = false;
    let keep = |line: &str| {
        let directive = continued || line.trim_start().starts_with('#');
        continued = directive && line.trim_end().ends_with('\\');
        if directive { String::new() } else { line.to_owned() }
    };
    code.lines().map(keep).collect::<Vec<_>>().join("\n")
}

/// Splits the inside of a block, up to the brace that closes it, into its outermost declarations.
fn declarations(code: &str, offset: usize, block: &str, functions: &mut Vec<(usize, String)>) {
    let (mut depth, mut begin) = (0, 0);
    for (at, c) in block.char_indices() {
        match c {
            '{' => {
                if depth == 0 {
                    push(code, offset + begin, &block[begin..at], functions);
                }
                depth += 1;
            }
            '}' if depth == 0 => return,
            '}' => {
                depth -= 1;
                begin = at + 1;
            }
            ';' if depth == 0 => {
                push(code, offset + begin, &block[begin..at], functions);
                begin = at + 1;
            }
            _ => {}
        }
    }
}

fn push(code: &str, offset: usize, declaration: &str, functions: &mut Vec<(usize, String)>) {
    let trimmed = declaration.trim();
    let is_type = ["typedef", "using", "struct", "enum", "class"].iter().any(|word| trimmed.starts_with(word));
    if trimmed.contains('(') && !is_type {
        let lead = declaration.len() - declaration.trim_start().len();
        let line = code[..offset + lead].matches('\n').count() + 1;
        functions.push((line, trimmed.split_whitespace().collect::<Vec<_>>().join(" ")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blank_and_lines_stay() {
        let rust = "let a = \"unsafe \\\" x\"; // unsafe\n/* unsafe /* nested */ unsafe */ let b = r#\"unsafe \" \"#;\n\
                    let c: &'static str = f('\"', '\\''); unsafe {}\n#![forbid(unsafe_code)]";
        let code = code_only(rust, Language::Rust);
        assert_eq!(lines_with_word(&code, "unsafe"), [3]);
        assert!(code.contains("&'static str") && code.contains("let b ="));
        assert_eq!(code.lines().count(), 4);
    }

    #[test]
    fn cpp_has_raw_strings_and_digit_separators() {
        let code = code_only("auto a = R\"x(unsafe)\")x\"; int b = 1'000; /* /* */ int unsafe;", Language::Cpp);
        assert_eq!(code.matches("unsafe").count(), 1);
        assert!(code.contains("int b = 1'000;"));
    }

    #[test]
    fn extern_c_functions_are_found_in_blocks_and_alone() {
        let text = "#define F(x) \\\n  g(x)\nextern \"C\" {\ntypedef void (*callback)(void*);\nstruct s { int a; };\n\
                    // int commented(void);\nint one(int a,\n        int b) noexcept;\n\
                    int two() { if (1) { f(); } return 0; }\n}\n\
                    int inner(int);\nextern \"C\" int three(void) noexcept { return 0; }\n";
        let found = extern_c_functions(text);
        let names: Vec<_> = found.iter().map(|(line, declaration)| (*line, declaration.as_str())).collect();
        let expected = [(7, "int one(int a, int b) noexcept"), (9, "int two()"), (12, "int three(void) noexcept")];
        assert_eq!(names, expected);
    }
}
