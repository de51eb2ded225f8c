"""The grids of the IQ types: the points that a code may name, as ggml's ggml-common.h lists them (MIT licence).

    iq2_xxs, iq2_xs, iq2_s    256, 512, 1024 points of 8 sizes out of 8, 25, 43
    iq3_xxs                   256 points of 4 sizes out of 4, 12, 20, 28, 36, 44, 52, 62
    iq3_s                     512 points of 4 sizes out of 1, 3, ... 15
    iq1_s (and iq1_m)         2048 points of 8 values out of -1, 0, 1

They were found by search, so they have to be stored: a point is a word of 2 (iq3: 3) bits a coordinate, the words of a
grid rise, and what is kept is their differences, upper bytes after lower ones, by zlib, in base 85.
"""
import base64
import zlib

import numpy as np

_SHAPES = (("iq2_xxs", 256, 8, (8, 25, 43)), ("iq2_xs", 512, 8, (8, 25, 43)), ("iq2_s", 1024, 8, (8, 25, 43)),
           ("iq3_xxs", 256, 4, (4, 12, 20, 28, 36, 44, 52, 62)), ("iq3_s", 512, 4, tuple(range(1, 16, 2))),
           ("iq1_s", 2048, 8, (-1, 0, 1)))
_DATA = (
    'c-'
    'rk(U5p&X5x%bO>gk#3o!PzHz1h9pyWRUg|KMzF85=}MOdP<mOe7+E?em7cBgj5{m{=sl4myb#C2x6*A|eE_NF+;9B;qI!L>9;jN|c8@gm+$&SA'
    '>L;2c!szRQ1gM-'
    '1&@=4`L&+(%npVS66*i^;LDx5J(B0w4fo8*7&jprrePhcN{FPKx657X$v%`%ahU;+w`29P6`*i=D|iAX{JIu?_Rs_&%^JLT)i=4an+QY!Q5{qu'
    'bMK>?0fN>uZ+GcZS%nM_|lcvz}!1ths*WX;Uk(G{q2G2ofpbK`28EHVG{*p<Xq!G9oORh(eR6=yj1zo@H>KJ@#=AZ@~y+?jBmUpvv&XE?|lRpK'
    'KS<U3g+-TfBVoj7hXL2*29-DglFD-'
    '6U@E?FBBKvexJQ)Tzc@4XZJN;h1`E^v9|o|nZI0}n#whQ^{+?v{^W!5{y%=0`VZ2hmrC~JDDZ#uma`cWNvEtKm(QiIlWZV3zhM(NFM1M%`bB9+'
    '$KZjrEYesbB@2z9#bGh$8|LX?d4mcYB!eoNMOY=Z&Bmqf6ne!Pscl{>?tPsyu&cQHIb44Ccq=o(dm791&y2q`_1MA*X)DRK1BHiHDnDB^FuHfo'
    '*k2belpoiy9(xzvfMpyfE<lo8%i`hCoTbFq7EcBD+AAy)N3Rt2*vd;E_5;+s$f1EZ51wi{UQ9MR=7Ra<L-%xwcg2S;&cWB$SWz@H-'
    'I|$u`03IAHnH=aC$IkVk?56v0GcodE%v)$E;p87!jK;zcQm%0Ke+t;M}J|)_s+rGW3|UjG<<^Tv}<kZfq(Bgk6*Rs?bGmD{^+m&e)tmcdNlaq6'
    '?0?}^whD&rKA7Y^UNsd3#R>Jcoj}pj%}WQkVy&zv9&S3(nHC-msYlWXnA%AVi0vU=;$i1r5k;>C!NIW2xpfwMOpmM^(<o27sYtA#rCCNPX*(11'
    'sQ3WJG9a_KGxlu`W37<y$RXRQhL#nb}R21w0r}QgA<Ij3%R+ym3dn4F0S>YD)&6jbwB78`4QKGAoa-BIjT-yP}VSJ_rt`AZs0aCHaf;tP`R99z'
    'PCY2e)??rften$+1s&oS+Lze_yc)a?;VHM*02x$hB31@tK8W(MRjm}W^i?Mm1}r?qBi8@V<KHiE^fBmSMM6nwca?Gb1kFt)HH=O$f$H3rphYeI'
    '^4klCCy-'
    'B`_n(Csz17CWqY~P$$9~|ij;)bk!Ju1C8N?p^!VjU7i4`ijMP54Ii(4Fv?K4EedBIeXmnD2cF=7n5?rQDrxrKF@VMW3aN=cl_sP~F|Ne7ah=wx'
    'psQJb0%Z8YATr-hu^H8;2+5e}B=l-z!1)w&tG<6IBK?(5u3MhK@6lFWKhNeC6Km|HdT0l5GQpC`L(j)mjNl`&5%Cj{6K`6@LdGIA3ds7-'
    'BKbH^H^nw~5u}7kY6H@FxkZP~0gaMCK=0vXOshw&vDi?$5Hy})EY_XI>RuMuKFjvaQ!(WL<w6@jyaA~1b3?s1WNHG?9U6`oPhLch0h=gc&k{F#'
    '&>QTdN8z<W)`PR;8cOIhg#>DK5esFU3%L~zN05P238EmiOXf7&E=Ibzga773SLI|KmrI8?VKs+gVP6;KY0_EitYN0?#8cL;EC?}2PSb@|Ea^zs'
    'B=v7M{2S9N`nvF3eY=zhZH<MFEr;|-'
    '_MMWTeii4yjPihaSg9VaNXc@?WA&@?yu%JVNl%v#uDmlq`UdbE>2t2C_+N3HuzMM&Z=Ey4vS~7mxQI;~`ga#@gf28txtBykLOHZl_^%p-'
    'U!khsNYO1Jm5aO7}3O$YnRf{G<cmyIJC>oH56;Cm5d}2goG%By4RnDV*L6936X%O6Snmi%<o|g}ZC7wna76DNO7)x!@v27ZLLs7AGX{Z#6Weh`'
    'I(WH|0S;_`s_8Zy{Q0Ed9aSkm7#|BifBe1Ul(LRoBDWCVoM~8KY+E|SDMsXx7#Zq+}>?PWffYo^~jG@Mv^9q%+j7BNd<?Z=KGXFK#-'
    'c(5EWYtQDtMn4`Xi?BmiqN$PN)W&}ub=F$SFH&#p%+gnj~=IKu}1a-vD4T#(I=*f1c^8Fp7!D-'
    '&xGOODlWL*VFb#Wm3X?Z75flQ(n=_5u~77~Kxpisb)%}R)D2GwCz&>Pp-'
    '47V?Ot=l8le!tFt8p;?pEZerWNjkb#{v`vmpUBSY>`XjI>%qPceKNs}mfAo+tDcI*r0jCd5CYn{!oYkj{Trgkx@n)POLO*K5ki7*{aPE(E*_I0'
    '%JRAQNgF*tFAwST|I1KFXzB1QVG%95Ga<(nt`NEEL@#2hENHbxY?)JtV@ky<Upx(q8M1PR4xVrmljeIG|BaSZk6riZnaP{=3t!9a61PenVlZ5C'
    'o_CiI4?0PR$fLhD=X#V`h)Ya41e@OV02>Vlkfa({ptf8eHTMkVy_0AIL7IBIG#pK@|$|T~1Q1AThv3SZEhjJ`<y?kr;Al2-'
    '<Pc%@SWN_{kx6p%=2!i!5nwDHS@`FmXJjSq?)*5rN58$0`iRJ$LVL*`Y|asU2!1+~tbSwv<p*BC6)Fv*6iXe1D<K){a6u<q)z3Ozm1ZL4VBoc1'
    'kKz;URgQL1m4QF7O32^P@$nBrOw}XTEGuo|OoegiU=@DIbY2sk0)5mY6h-'
    '<U6)fuwsz1nYo_X?rzehx&s%tR(d)(`gWzuD&5kDOkLEyDKz|Y(t(%0UrqBwhDZlRlquZLldWCvdRZyscG!-'
    'h!w>~gg1n>&rcB}+N0cWVc`dqf1z9e|ZAT(YXBO2M<%!<LwBeqxf^uFU6{MLZ<~>DzD8iQA&a;xO(;P4g=0w|-'
    'tlZIMkaU3<C;z!0Fn~qRh8hH=Hgyj)$}$yjKsxxKdWu{lx_YK&z33!?U<xG^S@5&GmO+P<LA8Rgjc-##8==M{1$MDpG|bR-'
    'Wy8aoyBbk6hz2#P<AJU?PxaT6K0_@t$44uDPOQ-PH6bAT-'
    '3oB5OFK%micTvv97TLoRqF@su9k#*uT@D80~b%6U7AVxWMN%bmau)G$SH+%d~oTCYFa{B&*O|G7>bn8b+G9bxXrfe87f(eVdS{`a*4)*j6)<(('
    'p<=<h24&8loH8iJd%D&c+HunZv#4}wIdT(yOm>rbQcpuq;`QX`~eqpAR64OI@$LFcjvJlQMfI-PZr8oC!epUUnVnLh-U_aAm@8gATE>Iozl3oZ'
    '!)Bt(vupr?{931-'
    '=iE@)jcfe^FED2)(C9c&!_^<vKy)nTqIy%CP1bqbV)P6&U#EOy%r<WYhIt}i}bQIbd#U>ge!RCWwD7&cTUiYD1E#E*wl*Xi(qex#*l0VkZ!Yms'
    'UabUw9~AHjty<~C$=t!TTmfxu1DNZMQMvpiko^NHXrt~;nFdX=F%qxAqJnDFe}xE*QpTe)f^rAlz-xOD#JU$4e{xs6t^N$x>NEgKFgemTa>|D*'
    '(JJ<(*FS@-'
    'h$5Fq`;5eB*bS~|DUtp`$J#+zR3UW?vq<RH1W2gza94Q_JY_N{?Z+vt*u+YJ0Ifb8Xex*ffKi}Jnn#o{Am?{_}sAdb{|2vxcz@_Gff-'
)


def _load():
    planes = np.frombuffer(zlib.decompress(base64.b85decode(_DATA)), np.uint8).reshape(2, -1)
    words = np.cumsum(np.ascontiguousarray(planes.T).view("<i2").ravel(), dtype=np.int64)
    grids, at = {}, 0
    for name, n, size, levels in _SHAPES:
        bits = 2 if size == 8 else 3
        index = words[at:at + n, None] >> bits * np.arange(size) & (1 << bits) - 1
        grids[name] = np.array(levels, np.int8)[index]
        at += n
    return grids


GRIDS = _load()                         # name -> int8 array [points][coordinates]
SIGNS = bytes(i | bin(i).count("1") % 2 << 7 for i in range(128))      # seven signs; the eighth makes their number even
