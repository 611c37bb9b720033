//! Follows the requests of one HTTP/1.1 connection in the bytes as they arrive.
//!
//! hyper parses; this only watches, for what hyper does not tell: whether the connection is between two requests or
//! inside a head, so that idleness and a slow head can be told apart; whether a head carries both `Content-Length` and
//! `Transfer-Encoding` (RFC 9112, 6.1; hyper drops the length and goes on); and whether a target has a fragment, which
//! none may have (RFC 9112, 3.2; hyper cuts it off). Knows no socket and no clock. Input that hyper refuses may leave it
//! wrong: that connection ends anyway.

use memchr::memchr;

/// Where in the stream of requests the next byte falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before a request line; blank lines here are skipped.
    Idle,
    /// Within a request line, after its method or not.
    RequestLine { method: bool },
    /// Within the header lines; `line` bytes of the current line were seen.
    Head { line: usize },
    /// Within a body of known length.
    Body { left: u64 },
    /// Within a chunk's size line.
    ChunkSize { size: u64, digits: bool },
    /// Within a chunk, its closing CRLF included.
    Chunk { left: u64 },
    /// Within the trailer section.
    Trailer(Trailer),
    /// The rest cannot be told.
    Lost,
}

/// Where in the trailer section, whose lines end with CRLF and nothing less, as hyper takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trailer {
    Start,
    Line,
    /// After the CR of a line.
    LineCr,
    /// After the CR of the blank line.
    EndCr,
}

/// What makes a request unfit to be forwarded although hyper takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Both `Content-Length` and `Transfer-Encoding`: where it ends is anybody's guess.
    TwoLengths,
    /// A fragment in its target.
    Fragment,
    /// A `Content-Length` line padded beyond any length.
    LongLength,
}

/// The longest name looked for, with its colon.
const NAME: usize = b"transfer-encoding:".len();
/// Longest start of a header line that is kept: the name, blanks, and a length of 20 digits.
const KEPT: usize = 64;

/// Tells heads from bodies on one connection.
#[derive(Debug)]
pub struct Framing {
    state: State,
    /// The start of the current header line, when it came in pieces.
    kept: [u8; KEPT],
    length: Option<u64>,
    chunked: bool,
    heads: u64,
    fragment: bool,
    long_length: bool,
    fault: Option<(u64, Fault)>,
}

impl Default for Framing {
    /// Starts before the first request.
    fn default() -> Self {
        Self {
            state: State::Idle,
            kept: [0; KEPT],
            length: None,
            chunked: false,
            heads: 0,
            fragment: false,
            long_length: false,
            fault: None,
        }
    }
}

impl Framing {
    /// No request has begun, and the last one is complete.
    pub fn is_idle(&self) -> bool {
        self.state == State::Idle
    }

    /// A head has begun and is not complete.
    pub fn in_head(&self) -> bool {
        matches!(self.state, State::RequestLine { .. } | State::Head { .. })
    }

    /// How many whole heads were seen.
    pub fn heads(&self) -> u64 {
        self.heads
    }

    /// The first request with a fault: its ordinal, from 1. What comes after it is not followed.
    pub fn fault(&self) -> Option<(u64, Fault)> {
        self.fault
    }

    /// Takes the next bytes.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            bytes = match self.state {
                State::Idle => self.idle(bytes),
                State::RequestLine { method } => self.request_line(bytes, method),
                State::Head { line } => self.head(bytes, line),
                State::Body { left } => self.skip(bytes, left, |left| State::Body { left }, State::Idle),
                State::ChunkSize { size, digits } => self.chunk_size(bytes, size, digits),
                State::Chunk { left } => {
                    let next = State::ChunkSize { size: 0, digits: true };
                    self.skip(bytes, left, |left| State::Chunk { left }, next)
                }
                State::Trailer(at) => self.trailer(bytes, at),
                State::Lost => return,
            };
        }
    }

    fn idle<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        match bytes.iter().position(|byte| !matches!(byte, b'\r' | b'\n')) {
            None => &[],
            Some(start) => {
                self.state = State::RequestLine { method: false };
                self.length = None;
                self.chunked = false;
                self.fragment = false;
                self.long_length = false;
                &bytes[start..]
            }
        }
    }

    fn request_line<'a>(&mut self, bytes: &'a [u8], mut method: bool) -> &'a [u8] {
        let end = memchr(b'\n', bytes);
        let (piece, rest) = bytes.split_at(end.map_or(bytes.len(), |end| end + 1));
        // In a method it is just a letter.
        let target = if method { Some(0) } else { memchr(b' ', piece) };
        if let Some(start) = target {
            method = true;
            self.fragment |= memchr(b'#', &piece[start..]).is_some();
        }
        self.state = if end.is_some() { State::Head { line: 0 } } else { State::RequestLine { method } };
        rest
    }

    fn head<'a>(&mut self, bytes: &'a [u8], seen: usize) -> &'a [u8] {
        let end = memchr(b'\n', bytes);
        let (piece, rest) = bytes.split_at(end.map_or(bytes.len(), |end| end + 1));
        if end.is_some() && seen == 0 {
            self.line(piece);
        } else {
            // Only lines that arrive in pieces are copied, and only their start.
            if seen < KEPT {
                let take = piece.len().min(KEPT - seen);
                self.kept[seen..seen + take].copy_from_slice(&piece[..take]);
            }
            let length = seen + piece.len();
            self.state = State::Head { line: length };
            if end.is_some() {
                let kept = self.kept;
                self.line(&kept[..length.min(KEPT)]);
            }
        }
        rest
    }

    /// One whole line of the head (or its start), with its line feed if it fits.
    fn line(&mut self, line: &[u8]) {
        self.state = State::Head { line: 0 };
        match line {
            b"\n" | b"\r\n" => self.head_ends(),
            [b'c' | b'C' | b't' | b'T', ..] => {
                if let Some(value) = value_of(line, b"content-length:") {
                    self.length = self.length.or(Some(decimal(value)));
                    self.long_length |= line.len() >= KEPT;
                } else if line.len() >= NAME && value_of(line, b"transfer-encoding:").is_some() {
                    self.chunked = true;
                }
            }
            _ => {}
        }
    }

    fn head_ends(&mut self) {
        self.heads += 1;
        let faults = [
            (self.chunked && self.length.is_some(), Fault::TwoLengths),
            (self.long_length, Fault::LongLength),
            (self.fragment, Fault::Fragment),
        ];
        if let Some((_, fault)) = faults.into_iter().find(|(it, _)| *it) {
            self.fault = Some((self.heads, fault));
            self.state = State::Lost;
            return;
        }
        self.state = match (self.chunked, self.length) {
            (true, _) => State::ChunkSize { size: 0, digits: true },
            (false, None | Some(0)) => State::Idle,
            (false, Some(left)) => State::Body { left },
        };
    }

    fn skip<'a>(&mut self, bytes: &'a [u8], left: u64, here: impl Fn(u64) -> State, then: State) -> &'a [u8] {
        let have = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if have < left {
            self.state = here(left - have);
            return &[];
        }
        self.state = then;
        bytes.get(usize::try_from(left).unwrap_or(usize::MAX)..).unwrap_or_default()
    }

    fn chunk_size<'a>(&mut self, bytes: &'a [u8], mut size: u64, mut digits: bool) -> &'a [u8] {
        for (index, byte) in bytes.iter().enumerate() {
            match char::from(*byte).to_digit(16) {
                _ if *byte == b'\n' => {
                    self.state = match size {
                        0 => State::Trailer(Trailer::Start),
                        size => State::Chunk { left: size.saturating_add(2) },
                    };
                    return &bytes[index + 1..];
                }
                Some(digit) if digits => size = size.saturating_mul(16).saturating_add(u64::from(digit)),
                _ => digits = false,
            }
        }
        self.state = State::ChunkSize { size, digits };
        &[]
    }

    fn trailer<'a>(&mut self, bytes: &'a [u8], mut at: Trailer) -> &'a [u8] {
        for (index, byte) in bytes.iter().enumerate() {
            at = match (at, byte) {
                (Trailer::EndCr, b'\n') => {
                    self.state = State::Idle;
                    return &bytes[index + 1..];
                }
                (Trailer::LineCr, b'\n') => Trailer::Start,
                // hyper refuses it and ends the connection.
                (Trailer::EndCr | Trailer::LineCr, _) => {
                    self.state = State::Lost;
                    return &[];
                }
                (Trailer::Start, b'\r') => Trailer::EndCr,
                (Trailer::Line, b'\r') => Trailer::LineCr,
                (Trailer::Start | Trailer::Line, _) => Trailer::Line,
            };
        }
        self.state = State::Trailer(at);
        &[]
    }
}

/// What follows `name` (lower case, with its colon) if the line begins with it in any case.
fn value_of<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (start, value) = line.split_at_checked(name.len())?;
    start.eq_ignore_ascii_case(name).then_some(value)
}

fn decimal(value: &[u8]) -> u64 {
    let digits = value.trim_ascii().iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(0_u64, |sum, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fed_in_pieces(bytes: &[u8], size: usize) -> Framing {
        let mut framing = Framing::default();
        bytes.chunks(size).for_each(|piece| framing.feed(piece));
        framing
    }

    #[test]
    fn requests_and_their_bodies_end_idle_however_they_are_cut() {
        let stream = b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\nPOST / HTTP/1.1\r\nCONTENT-length:  5 \r\n\r\n12\r\n5\
            PUT / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nA;x=1\r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\n\
            GET / HTTP/1.1\n\nPOST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n";
        for size in 1..=stream.len() {
            let framing = fed_in_pieces(stream, size);
            assert!(framing.is_idle(), "pieces of {size}: {framing:?}");
            assert_eq!((framing.heads, framing.fault()), (5, None), "pieces of {size}");
        }
    }

    #[test]
    fn a_head_is_open_until_its_blank_line() {
        let head = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
        for size in 1..head.len() {
            let framing = fed_in_pieces(&head[..head.len() - 1], size);
            assert!(framing.in_head() && !framing.is_idle(), "pieces of {size}");
        }
    }

    #[test]
    fn a_length_beside_a_transfer_coding_is_a_conflict_in_either_order() {
        for head in [
            "POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
            "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\nX: y\r\ncontent-length: 3\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
        ] {
            for size in 1..=head.len() {
                let first = "GET / HTTP/1.1\r\n\r\n".to_owned() + head;
                let fault = fed_in_pieces(first.as_bytes(), size).fault();
                assert_eq!(fault, Some((2, Fault::TwoLengths)), "{head} in pieces of {size}");
            }
        }
    }

    #[test]
    fn a_fragment_is_a_fault_in_the_target_only() {
        for size in 1..40 {
            let framing = fed_in_pieces(b"G#T / HTTP/1.1\r\nX: #\r\n\r\nGET /a#b HTTP/1.1\r\n\r\n", size);
            assert_eq!(framing.fault(), Some((2, Fault::Fragment)), "pieces of {size}");
        }
    }

    #[test]
    fn a_length_padded_beyond_what_is_kept_is_a_fault_however_it_is_cut() {
        for padding in [" ".repeat(70), "0".repeat(70)] {
            let head = format!("POST / HTTP/1.1\r\nContent-Length: {padding}5\r\n\r\n");
            for size in 1..=head.len() {
                let fault = fed_in_pieces(head.as_bytes(), size).fault();
                assert_eq!(fault, Some((1, Fault::LongLength)), "pieces of {size}");
            }
        }
    }

    #[test]
    fn trailers_end_where_hyper_ends_them() {
        let head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n";
        for (trailers, ends) in [
            (&b"\r\n"[..], true),
            (b"a: b\r\nc: d\r\n\r\n", true),
            // To hyper all of this is one trailer's line, that has not ended.
            (b"a: b\n\nGET /#f HTTP/1.1\n\n", false),
            (b"\n", false),
        ] {
            for size in 1..=head.len() {
                let framing = fed_in_pieces(&[head, trailers].concat(), size);
                assert_eq!(
                    (framing.is_idle(), framing.heads, framing.fault()),
                    (ends, 1, None),
                    "{trailers:?} in {size}"
                );
            }
        }
    }

    #[test]
    fn a_body_that_looks_like_a_head_is_a_body() {
        let body = "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n";
        let request = format!("POST / HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        assert_eq!(fed_in_pieces(request.as_bytes(), 7).fault(), None);
        let request =
            format!("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
        let framing = fed_in_pieces(request.as_bytes(), 11);
        assert!(framing.fault().is_none() && framing.is_idle());
    }
}
