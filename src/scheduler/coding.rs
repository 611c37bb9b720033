//! Reading a compressed 429's body for its `retry_after`. What goes to the client stays as Discord sent it.

use std::borrow::Cow;
use std::io::{Cursor, Read};

use http::HeaderMap;
use http::header::CONTENT_ENCODING;

/// Nothing Discord says in a 429 is longer.
const MAX_DECODED: u64 = 64 * 1024;

/// The body without its `Content-Encoding`; nothing if that is unknown, chained, or the bytes do not fit it.
pub fn decode<'a>(headers: &HeaderMap, body: &'a [u8]) -> Cow<'a, [u8]> {
    let Some(coding) = headers.get(CONTENT_ENCODING) else { return Cow::Borrowed(body) };
    let decoded = match coding.to_str().map(|name| name.trim().to_ascii_lowercase()).as_deref() {
        Ok("identity") => return Cow::Borrowed(body),
        Ok("gzip" | "x-gzip") => limited(flate2::read::MultiGzDecoder::new(body)),
        Ok("deflate") => limited(flate2::read::ZlibDecoder::new(body)),
        Ok("br") => limited(brotli_decompressor::Decompressor::new(Cursor::new(body), 4096)),
        Ok("zstd") => ruzstd::decoding::StreamingDecoder::new(body).ok().and_then(limited),
        _ => None,
    };
    Cow::Owned(decoded.unwrap_or_default())
}

fn limited(reader: impl Read) -> Option<Vec<u8>> {
    let mut decoded = Vec::new();
    reader.take(MAX_DECODED).read_to_end(&mut decoded).ok()?;
    Some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use std::io::Write;

    const BODY: &[u8] = br#"{"retry_after": 1.5}"#;

    fn with(coding: &'static str, body: &[u8]) -> Vec<u8> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static(coding));
        decode(&headers, body).into_owned()
    }

    #[test]
    fn every_coding_discord_uses_is_understood() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        gzip.write_all(BODY).unwrap();
        assert_eq!(with("gzip", &gzip.finish().unwrap()), BODY);
        let mut deflate = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
        deflate.write_all(BODY).unwrap();
        assert_eq!(with("deflate", &deflate.finish().unwrap()), BODY);
        let zstd = ruzstd::encoding::compress_to_vec(BODY, ruzstd::encoding::CompressionLevel::Uncompressed);
        assert_eq!(with("zstd", &zstd), BODY);
        // Made by Node.js's zlib.
        let brotli = [
            0x8b, 0x09, 0x80, 0x7b, 0x22, 0x72, 0x65, 0x74, 0x72, 0x79, 0x5f, 0x61, 0x66, 0x74, 0x65, 0x72, 0x22, 0x3a,
            0x20, 0x31, 0x2e, 0x35, 0x7d, 0x03,
        ];
        assert_eq!(with("br", &brotli), BODY);
        assert_eq!(decode(&HeaderMap::new(), BODY).as_ref(), BODY);
    }

    #[test]
    fn what_cannot_be_read_says_nothing() {
        for coding in ["gzip", "deflate", "br", "zstd", "compress", "gzip, br"] {
            assert_eq!(with(coding, b"not what it says"), b"", "{coding}");
        }
    }

    #[test]
    fn a_bomb_is_read_only_so_far() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        gzip.write_all(&vec![b' '; 10 << 20]).unwrap();
        assert_eq!(with("gzip", &gzip.finish().unwrap()).len() as u64, MAX_DECODED);
    }
}
